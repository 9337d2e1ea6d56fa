// What the sampler remembers of a request between passes: parameters, token counts, the drafter's id list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sampling_filters.h"
#include "sampling_math.h"

namespace paceline::sampling {

// Throws std::invalid_argument: a caller's mistake.
[[noreturn]] void fail(const std::string& message);

// A drafter's reduced vocabulary: column -> target id, strictly increasing, and back.
struct IdMap {
  std::vector<int32_t> ids;
  std::vector<int32_t> columns;  // per target id: its column, or -1

  IdMap(const int32_t* list, size_t count, int vocab_size);
  int column(int64_t id) const { return columns[static_cast<size_t>(id)]; }
};

// What one choice of one request needs for every draw. Counts follow the committed tokens; a block's drafts are counted
// for the length of a native call only (Prefix below), so there is nothing to roll back.
class SamplingState {
 public:
  int vocab_size = 0;
  Warp warp;
  double repetition = 1, presence = 0, frequency = 0;
  std::vector<std::pair<int32_t, float>> bias;
  std::vector<int32_t> banned;  // end-of-sequence and stop ids, masked while output is shorter than min_tokens
  int64_t min_tokens = 0;
  std::vector<int32_t> allowed;                 // nothing else can be drawn, increasing; empty: no such list
  std::vector<std::vector<int32_t>> bad_words;  // sequences that the output must not hold; none is empty
  uint64_t seed = 0;
  uint32_t choice = 0;
  int64_t num_prompt = 0, num_output = 0;

  bool penalised() const { return repetition != 1 || presence != 0 || frequency != 0; }
  int64_t num_tokens() const { return num_prompt + num_output; }
  // The noise of the next draw, or of one so many tokens later.
  NoiseKey noise(Stream stream, int64_t later = 0) const {
    return NoiseKey(seed, choice, static_cast<uint32_t>(num_tokens() + later), stream);
  }

  // Throws if `id` lies outside the vocabulary; `what` names the argument.
  void check(int64_t id, const char* what) const;
  void count_prompt(int64_t id) {
    ++num_prompt;
    if (penalised()) entries_[slot(id)].prompt = true;
  }
  void append(int64_t id) {
    ++num_output;
    if (penalised()) ++entries_[slot(id)].output;
    if (!bad_words.empty()) output_.push_back(static_cast<int32_t>(id));
  }
  // The last token that was appended.
  void take_back(int64_t id) {
    --num_output;
    if (penalised()) --entries_[slot(id)].output;
    if (!bad_words.empty()) output_.pop_back();
  }

  // Whether ids are ruled out for the next row, whatever its logits.
  bool masks() const { return !allowed.empty() || !bad_words.empty() || (!banned.empty() && num_output < min_tokens); }
  // True if `process` changes the next row.
  bool processes() const { return penalised() || !bias.empty() || masks(); }
  // Whether the masks permit this id as the next token.
  bool permits(int64_t id) const;

  // Order of vLLM's sampler: allowed ids, bad words, min_tokens, logit_bias, then repetition, frequency and presence
  // penalty. num_output and the output already include the drafts before this row.
  void process(float* x, const IdMap* map) const;

 private:
  struct Entry {
    int32_t id;
    int32_t output;
    bool prompt;
  };
  std::vector<Entry> entries_;   // distinct ids seen, in order of appearance
  std::vector<int32_t> slots_;   // per id: its entry, or -1; allocated for penalised requests alone
  std::vector<int32_t> output_;  // kept for bad words alone

  size_t slot(int64_t id);
  // Whether the output ends with all of the word but its last token.
  bool completes(const std::vector<int32_t>& word) const;
};

// Counts a block's tokens on top of a state and takes them off again.
class Prefix {
 public:
  explicit Prefix(SamplingState& state) : state_(state) {}
  Prefix(const Prefix&) = delete;
  Prefix& operator=(const Prefix&) = delete;
  ~Prefix() {
    for (; !tokens_.empty(); tokens_.pop_back()) state_.take_back(tokens_.back());
  }
  void push(int64_t id) {
    tokens_.push_back(id);
    state_.append(id);
  }

 private:
  SamplingState& state_;
  std::vector<int64_t> tokens_;
};

}  // namespace paceline::sampling
