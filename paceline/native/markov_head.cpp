// DSpark's sequential head: the logits of a slot get a low-rank bias from the token drawn in the slot before.
//
// With e = W1[previous token] and h the slot's hidden state (its products arrive ready, see `features`):
//   vanilla  z = e
//   gated    z = sigmoid(G_h h + b + G_e e) * e
//   rnn      (g, c, o) = J_h h + b + J_s s + J_e e;  s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c);  z = tanh(o)
//   logits  += W2 z
//   confidence = c_h h + b + c_e e: the logit of the chance that this slot is kept if those before it are
// One call runs all slots of all sequences. W2 is read once per slot for all sequences, by all threads of the pool.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "draft_heads.h"
#include "plan.h"
#include "sampling_filters.h"

namespace nb = nanobind;
using namespace nb::literals;

void register_markov_head(nb::module_& m);

namespace paceline {
namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<int64_t>;

// How sure a row is of its largest logit: the logit of that one's share in the softmax.
float certainty(const sampling::RowView& row) {
  if (row.empty()) return 0.0f;
  const double others = sampling::total_weight(row, 1.0f) - 1.0;
  return float(-std::log(std::max(others, 1e-6)));
}

float sigmoid(float x) { return float(1.0 / (1.0 + std::exp(-double(x)))); }

class MarkovHead {
 public:
  MarkovHead(std::shared_ptr<ThreadPool> pool, const std::string& isa, bool f32, nb::object w1, nb::object w2,
             const std::optional<Matrix>& inner, bool recurrent, const std::optional<Vector>& confidence,
             bool has_confidence, int max_sequences)
      : w1_(std::move(w1)),
        rank_(w1_.width()),
        recurrent_(recurrent),
        gated_(inner.has_value() && !recurrent),
        confident_(has_confidence),
        max_sequences_(max_sequences),
        w2_owner_(w2),
        plan_(std::move(pool), kernels_for(isa.c_str()), f32, max_sequences) {
    const Packed& packed = nb::cast<const Packed&>(w2);
    const size_t rows = recurrent ? 3 : 1, columns = recurrent ? 2 : 1;
    if (recurrent && !inner) throw std::invalid_argument("inner: a recurrent head needs its joint projection");
    if (inner) {
      if (inner->shape(0) != rows * size_t(rank_) || inner->shape(1) != columns * size_t(rank_))
        throw std::invalid_argument("inner: shape does not fit the rank of " + std::to_string(rank_));
      inner_.assign(inner->data(), inner->data() + inner->size());
    }
    if (confidence) {
      if (confidence->shape(0) != size_t(rank_)) throw std::invalid_argument("confidence: one weight per rank");
      confidence_.assign(confidence->data(), confidence->data() + confidence->size());
    }
    if (packed.k != rank_) throw std::invalid_argument("w2: its width is not that of w1");
    columns_ = packed.n;
    Op op{};
    op.kind = Op::kLinear;
    op.in = plan_.add_buffer(BufferKind::kInput, rank_);
    op.out = plan_.add_buffer(BufferKind::kLogits, columns_);
    op.w = &packed;
    op.epilogue = Epilogue::kAdd;
    op.convert = true;
    op.selected = true;
    plan_.add(op);
    side_ = recurrent_ ? 3 * rank_ : gated_ ? rank_ : 0;
  }

  // Columns of `features`: what h contributes to the gate or the joint projection, then to the confidence.
  int features() const { return side_ + int(confident_); }

  std::tuple<Tokens, std::vector<float>, nb::object, std::vector<float>> draft(
      Rows logits, const Matrix& features, const Tokens& anchors, const Tokens& counts,
      const std::vector<sampling::SamplingState*>& states, const sampling::IdMap* map, bool with_probs) {
    check(logits, features, anchors, counts, states, map);
    const size_t total = logits.shape(0), width = size_t(columns_);
    Tokens out(total);
    std::vector<float> confidence(confident_ ? total : 0), own(confidence.size());
    auto* probs = with_probs ? new std::vector<float>(total * width) : nullptr;
    nb::object array = nb::none();
    if (with_probs) {
      nb::capsule owner(probs, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
      const size_t shape[2] = {total, width};
      array = nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(probs->data(), 2, shape, owner));
    }
    {
      nb::gil_scoped_release release;
      run(logits.data(), features.data(), anchors, counts, states, map, out, confidence, own, probs);
    }
    return {std::move(out), std::move(confidence), std::move(array), std::move(own)};
  }

 private:
  void check(const Rows& logits, const Matrix& features, const Tokens& anchors, const Tokens& counts,
             const std::vector<sampling::SamplingState*>& states, const sampling::IdMap* map) const {
    const size_t n = states.size();
    if (n == 0 || n > size_t(max_sequences_) || anchors.size() != n || counts.size() != n)
      throw std::invalid_argument("states: 1 to " + std::to_string(max_sequences_) +
                                  " sequences, each with an anchor and a count");
    int64_t rows = 0;
    for (size_t i = 0; i < n; ++i) {
      if (counts[i] < 1 || counts[i] > int64_t(logits.shape(0)) || (i > 0 && counts[i] > counts[i - 1]))
        throw std::invalid_argument("counts: at least 1, and never rising");
      rows += counts[i];
      states[i]->check(anchors[i], "anchors");
      if (states[i]->vocab_size != w1_.vocab())
        throw std::invalid_argument("states: made for a vocabulary of " + std::to_string(states[i]->vocab_size) +
                                    ", w1 has " + std::to_string(w1_.vocab()));
    }
    if (rows != int64_t(logits.shape(0)) || logits.shape(1) != size_t(columns_))
      throw std::invalid_argument("logits: expected [" + std::to_string(rows) + ", " + std::to_string(columns_) + "]");
    if (map == nullptr ? columns_ != w1_.vocab()
                       : map->ids.size() != size_t(columns_) || map->columns.size() != size_t(w1_.vocab()))
      throw std::invalid_argument("id_map: does not fit the columns of w2");
    if (this->features() && (features.shape(0) != size_t(rows) || features.shape(1) != size_t(this->features())))
      throw std::invalid_argument("features: expected [" + std::to_string(rows) + ", " +
                                  std::to_string(this->features()) + "]");
  }

  void run(float* logits, const float* features, const Tokens& anchors, const Tokens& counts,
           const std::vector<sampling::SamplingState*>& states, const sampling::IdMap* map, Tokens& out,
           std::vector<float>& confidence, std::vector<float>& own, std::vector<float>* probs) {
    const size_t n = states.size(), rank = size_t(rank_), width = size_t(columns_);
    Tokens previous = anchors;
    std::vector<float> state(recurrent_ ? n * rank : 0), e(rank), z(n * rank);
    std::vector<std::unique_ptr<sampling::Prefix>> prefixes;
    for (sampling::SamplingState* s : states) prefixes.push_back(std::make_unique<sampling::Prefix>(*s));
    SlotRow slot;
    const auto stream = probs == nullptr ? sampling::Stream::kGumbel : sampling::Stream::kDraft;
    size_t row = 0, active = n;
    for (int64_t step = 0; step < counts[0]; ++step, row += active) {
      while (active > 0 && counts[active - 1] <= step) --active;
      for (size_t i = 0; i < active; ++i) {
        const float* h = features + (row + i) * size_t(this->features());
        w1_.row(previous[i], e.data());
        if (confident_) {
          float c = h[side_];
          if (!confidence_.empty()) c += dot(confidence_.data(), e.data(), rank_);
          confidence[row + i] = c;
        }
        mix(h, e.data(), recurrent_ ? &state[i * rank] : nullptr, &z[i * rank]);
      }
      add_bias(z.data(), logits + row * width, active);
      for (size_t i = 0; i < active; ++i) {
        sampling::SamplingState& s = *states[i];
        const sampling::RowView& view = slot.view(logits + (row + i) * width, columns_, map, s);
        if (confident_) own[row + i] = certainty(view);
        if (probs != nullptr) sampling::Distribution(view, s.warp).write(probs->data() + (row + i) * width);
        const int column = sampling::draw_coupled(view, s.warp, s.noise(stream));
        previous[i] = view.token(column);
        out[row + i] = previous[i];
        prefixes[i]->push(previous[i]);
      }
    }
  }

  // z of one slot; `state` is the recurrent head's.
  void mix(const float* h, const float* e, float* state, float* z) const {
    const size_t rank = size_t(rank_);
    if (gated_) {
      for (size_t r = 0; r < rank; ++r) z[r] = sigmoid(h[r] + dot(&inner_[r * rank], e, rank_)) * e[r];
    } else if (recurrent_) {
      std::vector<float> joint(3 * rank);
      for (size_t r = 0; r < 3 * rank; ++r) {
        const float* w = &inner_[r * 2 * rank];
        joint[r] = h[r] + dot(w, state, rank_) + dot(w + rank, e, rank_);
      }
      for (size_t r = 0; r < rank; ++r) {
        const float gate = sigmoid(joint[r]);
        state[r] = gate * state[r] + (1.0f - gate) * float(std::tanh(double(joint[rank + r])));
        z[r] = float(std::tanh(double(joint[2 * rank + r])));
      }
    } else {
      std::copy(e, e + rank, z);
    }
  }

  void add_bias(const float* z, float* logits, size_t rows) {
    order_.resize(rows);
    std::iota(order_.begin(), order_.end(), 0);
    const int32_t starts[2] = {0, int32_t(rows)};
    Batch b;
    b.rows = int(rows);
    b.sequences = 1;
    b.selected = int(rows);
    b.tokens = order_.data();
    b.positions = order_.data();
    b.starts = starts;
    b.select = order_.data();
    b.input = z;
    b.ld_input = size_t(rank_);
    b.logits = logits;
    b.ld_logits = size_t(columns_);
    plan_.run(b, nullptr);
  }

  const TokenTable w1_;
  const int rank_;
  const bool recurrent_, gated_, confident_;
  const int max_sequences_;
  int columns_ = 0, side_ = 0;
  std::vector<float> inner_;       // gated: G_e [r, r]; rnn: [J_s | J_e] [3r, 2r]
  std::vector<float> confidence_;  // c_e [r], or empty
  nb::object w2_owner_;
  Plan plan_;
  std::vector<int32_t> order_;
};

}  // namespace
}  // namespace paceline

void register_markov_head(nb::module_& m) {
  using paceline::MarkovHead;
  nb::class_<MarkovHead>(m, "MarkovHead", "DSpark's sequential head over the slots of draft blocks.")
      .def(
          nb::init<std::shared_ptr<paceline::ThreadPool>, const std::string&, bool, nb::object, nb::object,
                   const std::optional<paceline::Matrix>&, bool, const std::optional<paceline::Vector>&, bool, int>(),
          "pool"_a, "isa"_a, "f32"_a, "w1"_a, "w2"_a, "inner"_a = nb::none(), "recurrent"_a = false,
          "confidence"_a = nb::none(), "has_confidence"_a = false, "max_sequences"_a = 512,
          "w1: float32 or uint16 (bfloat16 bits) [vocabulary, r]. w2: Packed [columns, r]. inner: float32 [r, r] for a "
          "gated head, [3 r, 2 r] for a recurrent one. confidence: float32 [r], the weights of the token.")
      .def_prop_ro("features", &MarkovHead::features, "Columns of what `draft` takes as features.")
      .def("draft", &MarkovHead::draft, "logits"_a.noconvert(), "features"_a, "anchors"_a, "counts"_a, "states"_a,
           "id_map"_a = nb::none(), "probs"_a = false,
           "Draw all slots. Rows are ordered by slot, then by sequence; counts never rise. logits: float32 [slots, "
           "columns], biased in place. Returns (target ids, confidence logits or [], float32 [slots, columns] "
           "distributions or None, of a head with confidence the logit of each slot's likeliest token or []); with "
           "probs, drawn with the drafter's own noise, else with the target's.");
}
