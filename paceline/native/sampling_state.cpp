#include "sampling_state.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace paceline::sampling {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

}  // namespace

void fail(const std::string& message) { throw std::invalid_argument(message); }

IdMap::IdMap(const int32_t* list, size_t count, int vocab_size) {
  ids.assign(list, list + count);
  columns.assign(static_cast<size_t>(std::max(vocab_size, 0)), -1);
  if (ids.empty()) fail("ids: empty, expected at least one token id");
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size)
      fail("ids[" + std::to_string(i) + "] = " + std::to_string(ids[i]) + ": outside the vocabulary of " +
           std::to_string(vocab_size));
    if (i > 0 && ids[i] <= ids[i - 1])
      fail("ids[" + std::to_string(i) + "] = " + std::to_string(ids[i]) + ": ids must increase strictly; sort them");
    columns[static_cast<size_t>(ids[i])] = static_cast<int32_t>(i);
  }
}

void SamplingState::check(int64_t id, const char* what) const {
  if (id < 0 || id >= vocab_size)
    fail(std::string(what) + ": token id " + std::to_string(id) + " is outside the vocabulary of " +
         std::to_string(vocab_size));
}

bool SamplingState::completes(const std::vector<int32_t>& word) const {
  const size_t before = word.size() - 1;
  return before <= output_.size() && std::equal(word.begin(), word.end() - 1, output_.end() - ptrdiff_t(before));
}

bool SamplingState::permits(int64_t id) const {
  if (!allowed.empty() && !std::binary_search(allowed.begin(), allowed.end(), id)) return false;
  if (num_output < min_tokens && std::find(banned.begin(), banned.end(), id) != banned.end()) return false;
  return std::none_of(bad_words.begin(), bad_words.end(),
                      [&](const std::vector<int32_t>& word) { return word.back() == id && completes(word); });
}

void SamplingState::process(float* x, const IdMap* map) const {
  const auto column = [map](int32_t id) { return map == nullptr ? id : map->column(id); };
  const auto forbid = [&](int32_t id) {
    if (int c = column(id); c >= 0) x[c] = kNegInf;
  };
  if (!allowed.empty()) {
    static thread_local std::vector<float> kept;
    kept.clear();
    for (int32_t id : allowed)
      if (int c = column(id); c >= 0) kept.push_back(x[c]);
    std::fill_n(x, map == nullptr ? static_cast<size_t>(vocab_size) : map->ids.size(), kNegInf);
    auto next = kept.begin();
    for (int32_t id : allowed)
      if (int c = column(id); c >= 0) x[c] = *next++;
  }
  for (const std::vector<int32_t>& word : bad_words)
    if (completes(word)) forbid(word.back());
  if (num_output < min_tokens)
    for (int32_t id : banned) forbid(id);
  for (const auto& [id, value] : bias)
    if (int c = column(id); c >= 0) x[c] += value;
  if (!penalised()) return;
  const float rep = static_cast<float>(std::min(repetition, double(kLargest))), freq = static_cast<float>(frequency),
              pres = static_cast<float>(presence);
  for (const Entry& e : entries_) {
    if (!e.prompt && e.output == 0) continue;
    const int c = column(e.id);
    if (c < 0) continue;
    float v = x[c];
    if (v == kNegInf) continue;
    if (rep != 1.0f) v = v > 0 ? v / rep : v * rep;
    if (e.output > 0) {
      v -= freq * static_cast<float>(e.output);
      v -= pres;
    }
    x[c] = std::max(v, -kLargest);  // penalised beyond all floats, but not ruled out
  }
}

size_t SamplingState::slot(int64_t id) {
  if (slots_.empty()) slots_.assign(static_cast<size_t>(vocab_size), -1);
  int32_t& s = slots_[static_cast<size_t>(id)];
  if (s < 0) {
    s = static_cast<int32_t>(entries_.size());
    entries_.push_back({static_cast<int32_t>(id), 0, false});
  }
  return static_cast<size_t>(s);
}

}  // namespace paceline::sampling
