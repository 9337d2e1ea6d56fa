// Products with quantised weights: rows are quantised, multiplied panel by panel, and handed to the path's epilogues.
#include <algorithm>
#include <iterator>
#include <memory>

#include "plan.h"

namespace paceline {
namespace {

constexpr size_t kPrefetchBytes = 8192;
constexpr size_t kPrivateValues = 6144;  // quantising more than these in every thread costs more than a barrier

// A row, a part of which other cores have written: on its way while the one before is at work.
void ask_row(const float* x, int width) {
  for (int i = 0; i < width; i += 16) __builtin_prefetch(x + i);
}

// This thread's own, on whole lines: two panels of the widest product so far.
int8_t* spread_memory(size_t bytes) {
  thread_local std::unique_ptr<Region> memory;
  if (!memory || memory->bytes() < bytes) memory = std::make_unique<Region>(bytes);
  return reinterpret_cast<int8_t*>(memory->data());
}

}  // namespace

// Panels [panel_begin, panel_end) for all rows, in pairs (a gated result needs both). Several tiles of rows find a pair
// in the cache. Meanwhile the next pair, or the first one of the next product, is asked for, evenly over all passes.
void quant_gemm(const Kernels& kernels, const QuantKernels& quant, const Packed& w, const GemmArgs& g, int tile_rows,
                QuantGroup* records) {
  const auto* weights = static_cast<const uint8_t*>(g.w);
  const size_t panel_bytes = w.panel_bytes();
  const int tiles = (g.rows + tile_rows - 1) / tile_rows;
  const int passes = tiles * (tile_rows <= quant.whole_rows ? 1 : 2);
  const bool int4 = w.quant == Quant::kInt4 || w.quant == Quant::kInt4Min;
  const bool wide = quant.wide_rows && g.rows >= quant.wide_rows;
  const size_t spread_bytes = size_t(quant_groups(w.k)) * 2 * kSpreadGroup;
  int8_t* spread_panels = wide ? spread_memory(2 * spread_bytes) : nullptr;
  float tmp[kMaxQuantRows * 64];
  float activated[kMaxQuantRows * kGroup];  // of a pair of panels, one group
  GemmArgs group = g;
  group.act_out = activated;
  group.ld_act = kGroup;
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
        t.fresh = r0 == 0;
        if (wide) {
          t.spread = spread_panels + (tiles > 1 ? size_t(i) * spread_bytes : 0);  // read once, it stays nearest
          quant.wide_tile(w.quant, t);
        } else {
          quant.tile(w.quant, t);
        }
      }
      if (records) {  // rows of the group lie together, as their records do
        group.act_row = r0;
        group.act_column = p / 2 * kGroup;
        if (group.act_column + kGroup > g.n)
          std::fill(std::begin(activated), std::end(activated), 0.0f);  // its padding
        kernels.epilogue(group, tmp, r0, t.rows, p, panels);
        quant.quantise(activated, g.act == Act::kBF16, t.rows * kGroup,
                       records + size_t(r0) * size_t(quant_groups(g.n)) + size_t(p / 2) * size_t(tile_rows), 1);
      } else if (!straight) {
        kernels.epilogue(g, tmp, r0, t.rows, p, panels);
      }
    }
  }
  if (wide) quant.wide_end();
}

// The rows of a product as records, for this thread to read: as whoever wrote them has left them, or quantised here.
const QuantGroup* Plan::quantised_rows(const Op& op, const Batch& b, int rows, int tile_rows, int tid) {
  const Buffer& in = buffers_[op.in];
  if (in.records) return record_of(in, 0, 0, tile_rows);
  const int k = op.w->k;
  const size_t groups = size_t(quant_groups(k));
  const bool own = rows <= kPrivateRows && (rows == 1 || size_t(rows) * size_t(k) <= kPrivateValues);
  const size_t private_bytes = kPrivateRows * quant_groups_ * sizeof(QuantGroup);
  auto* records =
      reinterpret_cast<QuantGroup*>(own ? quant_private_->data() + size_t(tid) * private_bytes : quant_shared_->data());
  float* row = reinterpret_cast<float*>(quant_row_->data()) + size_t(tid) * quant_groups_ * kGroup;
  const Range mine = own ? Range{0, rows} : share(rows, tid, pool_->size());
  size_t ld = 0;
  const float* x = op.convert ? f32(op.in, b, &ld) : nullptr;
  for (int r = mine.begin; r < mine.end; ++r) {
    const int from = op.selected ? b.select[r] : r;
    if (x && r + 1 < mine.end) ask_row(x + size_t(op.selected ? b.select[r + 1] : r + 1) * ld, k);
    QuantGroup* to = records + size_t(r / tile_rows * tile_rows) * groups + size_t(r % tile_rows);
    if (!op.convert) {
      quant_kernels_.quantise(in.memory->data() + size_t(from) * in.stride * act_item(), act_ == Act::kBF16, k, to,
                              size_t(tile_rows));
    } else if (op.norm) {
      kernels_.norm_rows(x + size_t(from) * ld, ld, k, op.norm, op.eps, row, 0, Act::kF32, 0, 1);
      quant_kernels_.quantise(row, false, k, to, size_t(tile_rows));
    } else {
      quant_kernels_.quantise(x + size_t(from) * ld, false, k, to, size_t(tile_rows));
    }
  }
  if (!own) pool_->barrier();
  return records;
}

void Plan::quant_linear(const Op& op, const Batch& b, int tid) {
  const int threads = pool_->size();
  const int rows = op.selected ? b.selected : b.rows;
  if (rows == 0) return;
  const Packed& w = *op.w;
  const int tile_rows = quant_kernels_.tile_rows(rows);

  GemmArgs g{};
  g.a = quantised_rows(op, b, rows, tile_rows, tid);
  g.rows = rows;
  g.n = w.n;
  g.w = w.data;
  g.epilogue = op.epilogue;
  g.bias = op.bias;
  g.act = act_;
  QuantGroup* records = nullptr;
  if (w.gated) {
    const Buffer& out = buffers_[op.out];
    if (out.records) records = record_of(out, 0, 0, tile_rows);
    g.act_out = out.memory->data();
    g.ld_act = out.stride;
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
  quant_gemm(kernels_, quant_kernels_, w, g, tile_rows, records);
}

}  // namespace paceline
