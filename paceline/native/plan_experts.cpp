// Mixture of experts in a pass: route every row, sort the rows by expert, run each expert's products over its rows, and
// add up each row's experts in order of their ids. A product gives a row the same bits whichever rows share it, so the
// sorting changes nothing but the traffic: an expert's weights are read once for all rows that want it.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "plan.h"

namespace paceline {
namespace {

// Records of an expert's rows start here; tiles of an expert may be padded by up to kMaxQuantRows - 1 rows.
size_t first_record(const int* starts, int expert, size_t groups) {
  return (size_t(starts[expert]) + size_t(expert) * (kMaxQuantRows - 1)) * groups;
}

// A row of an expert as quantised records. i: its number among the expert's rows.
QuantGroup* record(Region& records, const int* starts, int expert, int i, size_t groups, int tile_rows) {
  const size_t at = size_t(i / tile_rows * tile_rows) * groups + size_t(i % tile_rows);
  return reinterpret_cast<QuantGroup*>(records.data()) + first_record(starts, expert, groups) + at;
}

}  // namespace

void Plan::check_experts(const Op& op) {
  using K = BufferKind;
  need(op.in, {K::kF32}, "experts in");
  need(op.delta, {K::kF32}, "experts router");
  need(op.out, {K::kF32}, "experts out");
  if (!op.experts || !op.norm) throw std::invalid_argument("experts: weights or norm are missing");
  const ExpertWeights& w = *op.experts;
  const int n = int(w.gate_up.size());
  if (n < 1 || w.down.size() != w.gate_up.size()) throw std::invalid_argument("experts: gate_up and down, one of each");
  if (w.top_k < 1 || w.top_k > n) throw std::invalid_argument("experts: top_k must be from 1 to their number");
  for (int e = 0; e < n; ++e) {
    const Packed &a = *w.gate_up[size_t(e)], &b = *w.down[size_t(e)];
    if (!a.gated || b.gated || a.k != w.hidden() || b.n != w.hidden() || a.n != w.inner() || b.k != w.inner() ||
        a.quant != w.gate_up[0]->quant || (b.quant == Quant::kNone) == w.quantised() ||
        (!w.quantised() && (a.f32 != f32_ || b.f32 != f32_)))
      throw std::invalid_argument("experts: the weights of expert " + std::to_string(e) + " do not fit");
  }
  if (buffers_[op.in].width != w.hidden() || buffers_[op.out].width != w.hidden() || buffers_[op.delta].width != n)
    throw std::invalid_argument("experts: widths do not fit");
  if (op.width != w.hidden()) throw std::invalid_argument("experts: the norm is not as wide as the rows");
  for (const Op& other : ops_)  // they share memory, and what lies behind a row's end must stay as it is
    if (other.kind == Op::kExperts && (other.experts->hidden() != w.hidden() || other.experts->inner() != w.inner()))
      throw std::invalid_argument("experts: all sparse layers of a plan must be of one size");
  expert_scratch_.reserve(w, max_rows_);
}

void Plan::experts(const Op& op, const Batch& b, int tid) {
  const ExpertWeights& w = *op.experts;
  ExpertScratch& s = expert_scratch_;
  const int n = int(w.gate_up.size()), k = w.top_k, hidden = w.hidden(), inner = w.inner();
  const Range rows = share(b.rows, tid, pool_->size());
  size_t ld, ld_router;
  const float* x = f32(op.in, b, &ld);
  const float* router = f32(op.delta, b, &ld_router);
  for (int r = rows.begin; r < rows.end; ++r)
    route(router + size_t(r) * ld_router, n, k, w.normalise, &s.ids[size_t(r) * k], &s.weights[size_t(r) * k]);
  pool_->barrier();
  if (tid == 0) sort_by_expert(s.ids.data(), b.rows, k, n, s.starts.data(), s.place.data());
  pool_->barrier();

  const size_t groups = s.hidden_groups ? size_t(quant_groups(hidden)) : 0;
  const size_t row_bytes = s.hidden_stride * act_item();
  std::vector<float> normed(w.quantised() ? s.hidden_stride : 0);
  for (int r = rows.begin; r < rows.end; ++r) {
    const float* from = x + size_t(r) * ld;
    const size_t first = size_t(r) * k;
    if (w.quantised()) {
      kernels_.norm_rows(from, ld, hidden, op.norm, op.eps, normed.data(), 0, Act::kF32, 0, 1);
      for (int j = 0; j < k; ++j) {
        const int e = s.ids[first + j], i = s.place[first + j] - s.starts[e];
        const int tile = quant_kernels_.tile_rows(s.starts[e + 1] - s.starts[e]);
        quant_kernels_.quantise(normed.data(), false, hidden,
                                record(*s.hidden_records, s.starts.data(), e, i, groups, tile), size_t(tile));
      }
      continue;
    }
    uint8_t* to = s.gathered->data() + size_t(s.place[first]) * row_bytes;
    if (hidden % 2) std::memset(to + size_t(hidden) * act_item(), 0, act_item());  // the last pair reads it
    kernels_.norm_rows(from, ld, hidden, op.norm, op.eps, to, 0, act_, 0, 1);
    for (int j = 1; j < k; ++j)
      std::memcpy(s.gathered->data() + size_t(s.place[first + j]) * row_bytes, to,
                  size_t(hidden + hidden % 2) * act_item());
  }
  pool_->barrier();
  expert_products(op, false, tid);
  pool_->barrier();

  const Range places = share(b.rows * k, tid, pool_->size());
  const size_t inner_bytes = s.inner_stride * act_item();
  if (w.quantised()) {
    const size_t inner_groups = size_t(quant_groups(inner));
    int e = 0;
    for (int p = places.begin; p < places.end; ++p) {
      while (p >= s.starts[e + 1]) ++e;
      const int tile = quant_kernels_.tile_rows(s.starts[e + 1] - s.starts[e]);
      quant_kernels_.quantise(s.inner->data() + size_t(p) * inner_bytes, act_ == Act::kBF16, inner,
                              record(*s.inner_records, s.starts.data(), e, p - s.starts[e], inner_groups, tile),
                              size_t(tile));
    }
    pool_->barrier();
  }
  expert_products(op, true, tid);
  pool_->barrier();

  size_t ld_out;
  float* out = f32(op.out, b, &ld_out);
  const float* results = reinterpret_cast<const float*>(s.out->data());
  std::vector<float> sum(s.hidden_stride);
  for (int r = rows.begin; r < rows.end; ++r) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int j = 0; j < k; ++j) {
      const size_t at = size_t(r) * k + j;
      kernels_.add_row(sum.data(), results + size_t(s.place[at]) * s.hidden_stride, hidden, s.weights[at]);
    }
    kernels_.add_row(out + size_t(r) * ld_out, sum.data(), hidden, 1.0f);
  }
}

// The first or the second product of every expert that has rows; threads share the panels of all of them.
void Plan::expert_products(const Op& op, bool down, int tid) {
  const ExpertWeights& w = *op.experts;
  ExpertScratch& s = expert_scratch_;
  const std::vector<const Packed*>& weights = down ? w.down : w.gate_up;
  const int n = int(weights.size()), unit = down ? 1 : 2;
  const int units = weights[0]->panels / unit;  // of one expert
  int active = 0;
  for (int e = 0; e < n; ++e) active += s.starts[e + 1] > s.starts[e];
  const Range mine = share(active * units, tid, pool_->size());
  int first = 0;  // unit of the expert at hand
  for (int e = 0; e < n; ++e) {
    const int rows = s.starts[e + 1] - s.starts[e];
    if (!rows) continue;
    const int begin = std::max(mine.begin - first, 0), end = std::min(mine.end - first, units);
    first += units;
    if (begin >= end) continue;
    const Packed& weight = *weights[size_t(e)];
    GemmArgs g{};
    g.rows = rows;
    g.k = weight.k;
    g.n = weight.n;
    g.w = weight.data;
    g.w_f32 = weight.f32;
    g.act = act_;
    g.panel_begin = begin * unit;
    g.panel_end = end * unit;
    g.far_rows = far_rows_;
    if (down) {
      g.out = reinterpret_cast<float*>(s.out->data()) + size_t(s.starts[e]) * s.hidden_stride;
      g.ldo = s.hidden_stride;
    } else {
      g.epilogue = Epilogue::kSwiGLU;
      g.act_out = s.inner->data() + size_t(s.starts[e]) * s.inner_stride * act_item();
      g.ld_act = s.inner_stride;
    }
    if (weight.quant != Quant::kNone) {
      const size_t groups = size_t(quant_groups(weight.k));
      Region& records = down ? *s.inner_records : *s.hidden_records;
      g.a = reinterpret_cast<QuantGroup*>(records.data()) + first_record(s.starts.data(), e, groups);
      g.next = weight.data;
      quant_gemm(kernels_, quant_kernels_, weight, g, quant_kernels_.tile_rows(rows));
    } else {
      g.a = (down ? s.inner : s.gathered)->data() +
            size_t(s.starts[e]) * (down ? s.inner_stride : s.hidden_stride) * act_item();
      g.lda = down ? s.inner_stride : s.hidden_stride;
      kernels_.gemm(g);
    }
  }
}

}  // namespace paceline
