// DFlash 2's candidate selector: of the best `top_k` tokens of each slot, a walk from left to right picks one, by the
// slot's own logit and how well it follows the one picked before: S(a, b) = U(b) + <A[a] * g, C[b]>, g the slot's
// projected hidden state.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "draft_heads.h"

namespace nb = nanobind;
using namespace nb::literals;

void register_candidate_selector(nb::module_& m);

namespace paceline {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<int64_t>;
using Result = std::tuple<Tokens, nb::object, nb::object, nb::object>;

template <class T>
nb::object to_numpy(std::vector<T>* values, size_t rows, size_t columns) {
  nb::capsule owner(values, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  const size_t shape[2] = {rows, columns};
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<2>>(values->data(), 2, shape, owner));
}

class CandidateSelector {
 public:
  CandidateSelector(nb::object predecessors, nb::object successors, int top_k)
      : predecessors_(std::move(predecessors)), successors_(std::move(successors)), top_k_(top_k) {
    if (predecessors_.vocab() != successors_.vocab() || predecessors_.width() != successors_.width())
      throw std::invalid_argument("successors: its shape is not that of predecessors");
    if (top_k < 1 || top_k > predecessors_.vocab())
      throw std::invalid_argument("top_k: " + std::to_string(top_k) + " is outside 1.." +
                                  std::to_string(predecessors_.vocab()));
  }

  Result draft(const Matrix& logits, const Matrix& features, const Tokens& anchors, const Tokens& counts,
               const std::vector<sampling::SamplingState*>& states, const sampling::IdMap* map, bool with_probs) {
    const size_t total = logits.shape(0), k = size_t(top_k_);
    if (map != nullptr && map->columns.size() != size_t(predecessors_.vocab()))
      throw std::invalid_argument("id_map: made for a vocabulary of " + std::to_string(map->columns.size()) +
                                  ", the codebooks have " + std::to_string(predecessors_.vocab()));
    const size_t columns = map == nullptr ? size_t(predecessors_.vocab()) : map->ids.size();
    if (logits.shape(1) != columns)
      throw std::invalid_argument("logits: " + std::to_string(logits.shape(1)) + " columns, expected " +
                                  std::to_string(columns));
    if (features.shape(0) != total || features.shape(1) != size_t(predecessors_.width()))
      throw std::invalid_argument("features: expected [" + std::to_string(total) + ", " +
                                  std::to_string(predecessors_.width()) + "]");
    if (anchors.size() != states.size() || counts.size() != states.size())
      throw std::invalid_argument("states: each needs an anchor and a count");
    size_t rows = 0;
    for (size_t i = 0; i < states.size(); ++i) {
      if (counts[i] < 0 || counts[i] > int64_t(total)) throw std::invalid_argument("counts: outside the logits");
      rows += size_t(counts[i]);
      states[i]->check(anchors[i], "anchors");
      if (states[i]->vocab_size != predecessors_.vocab())
        throw std::invalid_argument("states: made for another vocabulary than the codebooks");
    }
    if (rows != total) throw std::invalid_argument("counts: not those of the rows of logits");
    Tokens out(total);
    auto* ids = new std::vector<int32_t>(total * k);
    nb::object id_array = to_numpy(ids, total, k);
    auto* scores = new std::vector<float>(total * k);
    nb::object score_array = to_numpy(scores, total, k);
    nb::object prob_array = nb::none();
    std::vector<float>* probs = nullptr;
    if (with_probs) {
      probs = new std::vector<float>(total * k);
      prob_array = to_numpy(probs, total, k);
    }
    {
      nb::gil_scoped_release release;
      size_t row = 0;
      for (size_t i = 0; i < states.size(); ++i) {
        sampling::Prefix prefix(*states[i]);
        int64_t previous = anchors[i];
        for (int64_t j = 0; j < counts[i]; ++j, ++row) {
          previous = step(logits.data() + row * columns, int(columns), map, features.data() + row * features.shape(1),
                          previous, *states[i], ids->data() + row * k, scores->data() + row * k,
                          probs == nullptr ? nullptr : probs->data() + row * k);
          out[row] = previous;
          prefix.push(previous);
        }
      }
    }
    return {std::move(out), std::move(id_array), std::move(score_array), std::move(prob_array)};
  }

 private:
  // One slot: candidates in order of their ids, their scores, and the token picked.
  int64_t step(const float* logits, int columns, const sampling::IdMap* map, const float* g, int64_t previous,
               const sampling::SamplingState& state, int32_t* ids, float* scores, float* probs) {
    const int rank = predecessors_.width();
    const sampling::RowView& row = slot_.view(logits, columns, map, state);
    best_.columns.clear();
    best_.logits.clear();
    if (!row.empty()) sampling::best_of(row, top_k_, best_);
    const size_t found = best_.columns.size();
    query_.resize(size_t(rank));
    edge_.resize(size_t(rank));
    predecessors_.row(previous, query_.data());
    for (int r = 0; r < rank; ++r) query_[size_t(r)] *= g[r];
    for (size_t c = 0; c < found; ++c) {
      ids[c] = int32_t(row.token(best_.columns[c]));
      successors_.row(ids[c], edge_.data());
      scores[c] = best_.logits[c] + dot(query_.data(), edge_.data(), rank);
    }
    pad(ids, scores, found);
    small_.reset(scores, top_k_, ids);
    // the drafter's distribution has the temperature alone; filters are the target's
    const sampling::Warp warp{state.warp.temperature, 0, 1.0, 0.0};
    if (probs != nullptr) sampling::Distribution(small_, warp).write(probs);
    const auto stream = probs == nullptr ? sampling::Stream::kGumbel : sampling::Stream::kDraft;
    return ids[sampling::draw_coupled(small_, warp, state.noise(stream))];
  }

  // A row that permits fewer tokens than `top_k`: the rest are other ids that cannot be drawn. Keeps ids increasing.
  void pad(int32_t* ids, float* scores, size_t found) const {
    const size_t k = size_t(top_k_);
    if (found == k) return;
    std::vector<std::pair<int32_t, float>> all;
    for (size_t c = 0; c < found; ++c) all.emplace_back(ids[c], scores[c]);
    size_t taken = 0;
    for (int32_t id = 0; all.size() < k; ++id) {
      if (taken < found && ids[taken] == id)
        ++taken;
      else
        all.emplace_back(id, -std::numeric_limits<float>::infinity());
    }
    std::sort(all.begin(), all.end());
    for (size_t c = 0; c < k; ++c) {
      ids[c] = all[c].first;
      scores[c] = all[c].second;
    }
  }

  const TokenTable predecessors_, successors_;
  const int top_k_;
  SlotRow slot_;
  sampling::RowView small_;
  sampling::Survivors best_;
  std::vector<float> query_, edge_;
};

}  // namespace
}  // namespace paceline

void register_candidate_selector(nb::module_& m) {
  using paceline::CandidateSelector;
  nb::class_<CandidateSelector>(m, "CandidateSelector", "DFlash 2's walk through the best tokens of each slot.")
      .def(nb::init<nb::object, nb::object, int>(), "predecessors"_a, "successors"_a, "top_k"_a,
           "predecessors, successors: float32 or uint16 (bfloat16 bits) [vocabulary, r].")
      .def("draft", &CandidateSelector::draft, "logits"_a, "features"_a, "anchors"_a, "counts"_a, "states"_a,
           "id_map"_a = nb::none(), "probs"_a = false,
           "Draw all slots, one sequence after the other. logits: float32 [slots, columns], those of the whole "
           "vocabulary or of id_map's ids; features: float32 [slots, r]. Returns (tokens, ids int32 [slots, top_k] in "
           "increasing order, their scores float32, and with probs the float32 distributions drawn from with the "
           "drafter's own noise, else None).");
}
