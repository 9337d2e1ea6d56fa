// Draft trees: the best tokens of each slot of a block, and the walk of the target's draws down a verified tree.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "draft_heads.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace paceline::sampling;

void register_draft_tree(nb::module_& m);

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<int64_t>;
using Blocks = std::vector<Tokens>;

constexpr int kPool = 64;  // best logits of a row among which noise may choose

template <class T>
nb::object to_numpy(std::vector<T>* values, size_t rows, size_t columns) {
  nb::capsule owner(values, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  const size_t shape[2] = {rows, columns};
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<2>>(values->data(), 2, shape, owner));
}

void check_rows(const Logits& logits, int64_t rows) {
  if (rows != static_cast<int64_t>(logits.shape(0)))
    fail("logits: " + std::to_string(logits.shape(0)) + " rows, the others need " + std::to_string(rows));
}

// One row: the draw that the target would make of these logits, then the tokens that it would make if they were a
// little different, in order of their noisy logits; and log-chances from a softmax over the noisy logits.
void candidates_of(const RowView& row, const SamplingState& state, int top, int32_t* ids, float* logs) {
  static thread_local Survivors best;
  static thread_local std::vector<std::pair<float, int>> order;  // noisy logit, column
  std::fill(ids, ids + top, -1);
  std::fill(logs, logs + top, -std::numeric_limits<float>::infinity());
  if (row.empty()) return;
  const double heat = std::max(0.0, state.warp.temperature);
  best_of(row, heat > 0 ? std::max(top, kPool) : top, best);
  const NoiseKey key = state.noise(Stream::kGumbel);
  double plain = 0, noisy = 0;  // weights of the best, without and with noise
  order.clear();
  for (size_t i = 0; i < best.columns.size(); ++i) {
    const double x = static_cast<double>(best.logits[i]) - static_cast<double>(row.max());
    const double with =
        heat > 0 ? x + heat * gumbel(noise_bits(key, static_cast<uint32_t>(row.token(best.columns[i])))) : x;
    plain += std::exp(x);
    noisy += std::exp(with);
    order.emplace_back(static_cast<float>(with), best.columns[i]);
  }
  const double total = std::log(noisy + std::max(0.0, total_weight(row, 1.0f) - plain));
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  });
  // filters, or noise on a token far down, may make the draw another one than the first of these
  const int drawn = draw_coupled(row, state.warp, key);
  const auto place = std::find_if(order.begin(), order.end(), [&](const auto& o) { return o.second == drawn; });
  if (place == order.end())
    order.insert(order.begin(), {order.front().first, drawn});
  else
    std::rotate(order.begin(), place, place + 1);
  order.front().first = std::max(order.front().first, order[std::min<size_t>(1, order.size() - 1)].first);
  const size_t count = std::min(order.size(), static_cast<size_t>(top));
  for (size_t i = 0; i < count; ++i) {
    ids[i] = static_cast<int32_t>(row.token(order[i].second));
    logs[i] = static_cast<float>(std::min(0.0, static_cast<double>(order[i].first) - total));
  }
}

std::tuple<nb::object, nb::object> candidates(const Logits& logits, const std::vector<SamplingState*>& states,
                                              const Tokens& counts, int top, const IdMap* map) {
  const int width = static_cast<int>(logits.shape(1));
  if (top < 1 || top > width) fail("top: " + std::to_string(top) + " is outside 1.." + std::to_string(width));
  if (counts.size() != states.size()) fail("counts: one per state expected");
  if (map != nullptr && map->ids.size() != logits.shape(1)) fail("id_map: not that of the columns of logits");
  int64_t rows = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    if (counts[i] < 0) fail("counts: negative");
    rows += counts[i];
    const int vocab = map == nullptr ? width : static_cast<int>(map->columns.size());
    if (states[i]->vocab_size != vocab) fail("states: made for another vocabulary than the logits");
  }
  check_rows(logits, rows);
  const size_t total = logits.shape(0), k = static_cast<size_t>(top);
  auto* ids = new std::vector<int32_t>(total * k);
  nb::object id_array = to_numpy(ids, total, k);
  auto* logs = new std::vector<float>(total * k);
  nb::object log_array = to_numpy(logs, total, k);
  {
    nb::gil_scoped_release release;
    paceline::SlotRow slot;
    size_t row = 0;
    for (size_t i = 0; i < states.size(); ++i) {
      Prefix prefix(*states[i]);
      for (int64_t j = 0; j < counts[i]; ++j, ++row) {
        const RowView& view = slot.view(logits.data() + row * logits.shape(1), width, map, *states[i]);
        candidates_of(view, *states[i], top, ids->data() + row * k, logs->data() + row * k);
        prefix.push(std::max((*ids)[row * k], 0));
      }
    }
  }
  return {std::move(id_array), std::move(log_array)};
}

std::vector<std::pair<Tokens, Tokens>> walk(const Logits& logits, const std::vector<SamplingState*>& states,
                                            const Blocks& drafts, const Blocks& parents) {
  const int width = static_cast<int>(logits.shape(1));
  if (drafts.size() != states.size() || parents.size() != states.size())
    fail("drafts, parents: one list per state expected");
  int64_t rows = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i]->vocab_size != width) fail("states: made for another vocabulary than the logits");
    if (parents[i].size() != drafts[i].size()) fail("parents: one per draft expected");
    for (size_t j = 0; j < drafts[i].size(); ++j) {
      states[i]->check(drafts[i][j], "drafts");
      if (parents[i][j] < 0 || parents[i][j] > static_cast<int64_t>(j))
        fail("parents: a draft comes behind its parent");
    }
    rows += static_cast<int64_t>(drafts[i].size()) + 1;
  }
  check_rows(logits, rows);
  std::vector<std::pair<Tokens, Tokens>> out;
  nb::gil_scoped_release release;
  paceline::SlotRow slot;
  size_t first = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    Prefix prefix(*states[i]);
    Tokens path{0}, tokens;
    for (size_t at = 0;;) {
      const float* raw = logits.data() + (first + at) * logits.shape(1);
      const RowView& view = slot.view(raw, width, nullptr, *states[i]);
      const int64_t token =
          exhausted(view, raw) ? kNoToken : draw_coupled(view, states[i]->warp, states[i]->noise(Stream::kGumbel));
      tokens.push_back(token);
      size_t child = at;
      while (child < drafts[i].size() && !(parents[i][child] == static_cast<int64_t>(at) && drafts[i][child] == token))
        ++child;
      if (child == drafts[i].size()) break;
      prefix.push(token);
      at = child + 1;
      path.push_back(static_cast<int64_t>(at));
    }
    out.emplace_back(std::move(path), std::move(tokens));
    first += drafts[i].size() + 1;
  }
  return out;
}

}  // namespace

void register_draft_tree(nb::module_& m) {
  m.def("draft_candidates", &candidates, "logits"_a, "states"_a, "counts"_a, "top"_a, "id_map"_a = nb::none(),
        "The best tokens of each slot of a block, with the target's noise: (ids int32 [rows, top], log-chances float32 "
        "[rows, top]), best first. State i owns counts[i] rows; the first token of a row is the one that draft_rows "
        "draws there. Where a row permits fewer, id -1 with log-chance -inf.");
  m.def("walk_rows", &walk, "logits"_a, "states"_a, "drafts"_a, "parents"_a,
        "Follows the target's draws down trees of drafts. State i owns len(drafts[i]) + 1 rows; row j + 1 is draft j, "
        "whose parent is row parents[i][j] <= j. Per state: (rows visited, from 0 on; the token drawn in each). The "
        "draw of a row sees the drafts on the way to it, with the bits of sample_rows.");
}
