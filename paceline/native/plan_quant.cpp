// Products with quantised weights: rows are quantised, multiplied panel by panel, and handed to the path's epilogues.
#include <algorithm>
#include <memory>

#include "plan.h"

namespace paceline {
namespace {

constexpr size_t kPrefetchBytes = 8192;
constexpr size_t kPrivateValues = 8192;  // quantising more than these in every thread costs more than a barrier
constexpr int kWholePanelRows = 6;       // up to here a tile walks over both halves of a panel at once

// This thread's own, on whole lines: two panels of the widest product so far.
int8_t* spread_memory(size_t bytes) {
  thread_local std::unique_ptr<Region> memory;
  if (!memory || memory->bytes() < bytes) memory = std::make_unique<Region>(bytes);
  return reinterpret_cast<int8_t*>(memory->data());
}

}  // namespace

// Panels [panel_begin, panel_end) for all rows, in pairs (a gated result needs both). Several tiles of rows find a pair
// in the cache. Meanwhile the next pair, or the first one of the next product, is asked for, evenly over all passes.
void quant_gemm(const Kernels& kernels, const QuantKernels& quant, const Packed& w, const GemmArgs& g, int tile_rows) {
  const auto* weights = static_cast<const uint8_t*>(g.w);
  const size_t panel_bytes = w.panel_bytes();
  const int tiles = (g.rows + tile_rows - 1) / tile_rows;
  const int passes = tiles * (tile_rows <= kWholePanelRows ? 1 : 2);
  const bool int4 = w.quant == Quant::kInt4 || w.quant == Quant::kInt4Min;
  const bool wide = quant.wide_rows && g.rows >= quant.wide_rows;
  const size_t spread_bytes = size_t(quant_groups(w.k)) * 2 * kSpreadGroup;
  int8_t* spread_panels = wide ? spread_memory(2 * spread_bytes) : nullptr;
  float tmp[kMaxQuantRows * 64];
  QuantTile t{};
  t.groups = quant_groups(w.k);
  t.lines = int((quant_group_bytes(w.quant) / 64 + size_t(passes) - 1) / size_t(passes));
  t.near = g.rows <= 2 && int4;  // measured: a thin stream is faster from the first-level cache, any other is not
  const size_t pass_bytes = size_t(t.groups) * size_t(t.lines) * 64 * size_t(passes / tiles);
  if (wide) quant.wide_begin(std::min(tile_rows, g.rows));
  for (int p = g.panel_begin; p < g.panel_end; p += 2) {
    const int panels = std::min(2, g.panel_end - p);
    const bool straight = g.epilogue == Epilogue::kStore && !g.bias && (p + panels) * kPanel <= g.n;
    const uint8_t* follow = p + panels < g.panel_end ? weights + size_t(p + panels) * panel_bytes : g.next;
    for (int r0 = 0; r0 < g.rows; r0 += tile_rows) {
      t.a = static_cast<const QuantGroup*>(g.a) + size_t(r0) * size_t(t.groups);
      t.stride = tile_rows;
      t.rows = std::min(tile_rows, g.rows - r0);
      t.ld = straight ? g.ldo : size_t(panels * kPanel);
      float* to = straight ? g.out + size_t(r0) * g.ldo + p * kPanel : tmp;
      for (int i = 0; i < panels; ++i) {
        t.w = weights + size_t(p + i) * panel_bytes;
        t.next = t.near ? t.w + kPrefetchBytes : follow + size_t(i) * panel_bytes + size_t(r0 / tile_rows) * pass_bytes;
        t.out = to + i * kPanel;
        if (wide) {
          t.spread = spread_panels + (tiles > 1 ? size_t(i) * spread_bytes : 0);  // read once, it stays nearest
          t.fresh = r0 == 0;
          quant.wide_tile(w.quant, t);
        } else {
          quant.tile(w.quant, t);
        }
      }
      if (!straight) kernels.epilogue(g, tmp, r0, t.rows, p, panels);
    }
  }
  if (wide) quant.wide_end();
}

void Plan::quant_linear(const Op& op, const Batch& b, int tid) {
  const int threads = pool_->size();
  const int rows = op.selected ? b.selected : b.rows;
  if (rows == 0) return;
  const Packed& w = *op.w;
  const size_t groups = size_t(quant_groups(w.k));
  const int tile_rows = quant_kernels_.tile_rows(rows);

  const bool own = rows <= kPrivateRows && (rows == 1 || size_t(rows) * size_t(w.k) <= kPrivateValues);
  auto* records = reinterpret_cast<QuantGroup*>(own ? quant_private_->data() + size_t(tid) * kPrivateRows *
                                                                                   quant_groups_ * sizeof(QuantGroup)
                                                    : quant_shared_->data());
  float* row = reinterpret_cast<float*>(quant_row_->data()) + size_t(tid) * quant_groups_ * kGroup;
  const Range mine = own ? Range{0, rows} : share(rows, tid, threads);
  size_t ld = 0;
  const float* x = op.convert ? f32(op.in, b, &ld) : nullptr;
  for (int r = mine.begin; r < mine.end; ++r) {
    const int from = op.selected ? b.select[r] : r;
    QuantGroup* to = records + size_t(r / tile_rows * tile_rows) * groups + size_t(r % tile_rows);
    if (!op.convert) {
      const Buffer& in = buffers_[op.in];
      quant_kernels_.quantise(in.memory->data() + size_t(from) * in.stride * act_item(), act_ == Act::kBF16, w.k, to,
                              size_t(tile_rows));
    } else if (op.norm) {
      kernels_.norm_rows(x + size_t(from) * ld, ld, w.k, op.norm, op.eps, row, 0, Act::kF32, 0, 1);
      quant_kernels_.quantise(row, false, w.k, to, size_t(tile_rows));
    } else {
      quant_kernels_.quantise(x + size_t(from) * ld, false, w.k, to, size_t(tile_rows));
    }
  }
  if (!own) pool_->barrier();

  GemmArgs g{};
  g.rows = rows;
  g.n = w.n;
  g.a = records;
  g.w = w.data;
  g.epilogue = op.epilogue;
  g.bias = op.bias;
  g.act = act_;
  if (w.gated) {
    g.act_out = buffers_[op.out].memory->data();
    g.ld_act = buffers_[op.out].stride;
  } else {
    g.out = f32(op.out, b, &g.ldo);
  }
  const int unit = w.gated ? 2 : 1;
  const Range panels = share(w.panels / unit, tid, threads);
  g.panel_begin = panels.begin * unit;
  g.panel_end = panels.end * unit;
  for (const Op* next = &op + 1; next < ops_.data() + ops_.size(); ++next) {
    if (next->kind != Op::kLinear) continue;
    const int next_unit = next->w->gated ? 2 : 1;
    const Range first = share(next->w->panels / next_unit, tid, threads);
    g.next = next->w->data + next->w->panel_bytes() * size_t(first.begin * next_unit);
    break;
  }
  if (!g.next) g.next = w.data;
  quant_gemm(kernels_, quant_kernels_, w, g, tile_rows);
}

}  // namespace paceline
