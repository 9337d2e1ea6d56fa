// Matrix products of bf16 weights with the tile unit (AMX). Everything else of the path is that of avx512_bf16.
//
// Invariant 1 (design): a tile product adds to every output the products of 32 values of k, in an order of its own;
// those of one output never depend on the other rows of the tile or on how many there are. Tiles begin at multiples of
// 32, and the last one is filled up with zeros. So a row has the same bits in every shape here, but not those of
// avx512_bf16: this path takes tiles for one row too.
#if defined(__x86_64__) && defined(PACELINE_AMX)
#include <immintrin.h>

#include <cstring>

#include "amx.h"
#include "amx_tiles.h"
#include "kernels.h"

namespace {

using paceline::GemmArgs;

constexpr int kTileRows = 16;
constexpr int kTilePairs = 16;                            // pairs of k in a tile
constexpr size_t kChunkBytes = size_t(kTilePairs) * 128;  // of a panel: both halves of 16 columns
constexpr int kAhead = 16;  // so many chunks before it is read, a panel is asked for into the second-level cache

// Tiles 0 to 3 are sums. One tile of rows: 4 is rows, 5 to 7 are weights. Several: 4 and 5 are rows, 6 and 7 weights.
inline void configure(int rows, bool several) {
  TileConfig c;
  for (int i = 0; i < 8; ++i) c.set(i, i < 5 || (several && i == 5) ? rows : kTilePairs, 64);
  c.load();
}

// The part of k behind the last whole tile, filled up with zeros.
struct Tail {
  int pairs;
  alignas(64) uint8_t rows[2][kTileRows * 64];
  alignas(64) uint8_t weights[2][kChunkBytes];

  void take_rows(int which, const uint8_t* a, size_t stride, int count) {
    for (int r = 0; r < count; ++r) {
      std::memset(rows[which] + r * 64, 0, 64);
      std::memcpy(rows[which] + r * 64, a + size_t(r) * stride, size_t(pairs) * 4);
    }
    written(rows);
  }
  void take_weights(int which, const uint8_t* w) {
    std::memset(weights[which], 0, kChunkBytes);
    std::memcpy(weights[which], w, size_t(pairs) * 128);
    written(weights);
  }
};

inline void ask(const uint8_t* p, int lines) {
#pragma GCC unroll 32
  for (int i = 0; i < lines; ++i) _mm_prefetch((const char*)(p + i * 64), _MM_HINT_T1);
}

// One tile of rows times `PANELS` panels (1 or 2): sums [rows][PANELS * 32].
template <int PANELS>
void thin(const uint8_t* a, size_t stride, const uint8_t* w0, const uint8_t* w1, int chunks, const uint8_t* f0,
          const uint8_t* f1, Tail& tail, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (PANELS == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const int ahead = chunks < kAhead ? chunks : kAhead;
  for (int i = 0; i < chunks; ++i) {
    const size_t at = size_t(i) * kChunkBytes;
    const bool own = i + ahead < chunks;
    const size_t next = size_t(own ? i + ahead : i + ahead - chunks) * kChunkBytes;
    _tile_loadd(4, a + size_t(i) * 64, stride);
    ask((own ? w0 : f0) + next, 32);
    _tile_loadd(5, w0 + at, 128);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, w0 + at + 64, 128);
    _tile_dpbf16ps(1, 4, 6);
    if (PANELS == 2) {
      ask((own ? w1 : f1) + next, 32);
      _tile_loadd(7, w1 + at, 128);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, w1 + at + 64, 128);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  if (tail.pairs) {
    const size_t at = size_t(chunks) * kChunkBytes;
    tail.take_weights(0, w0 + at);
    _tile_loadd(4, tail.rows[0], 64);
    _tile_loadd(5, tail.weights[0], 128);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, tail.weights[0] + 64, 128);
    _tile_dpbf16ps(1, 4, 6);
    if (PANELS == 2) {
      tail.take_weights(1, w1 + at);
      _tile_loadd(7, tail.weights[1], 128);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, tail.weights[1] + 64, 128);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums, PANELS * 128);
  _tile_stored(1, sums + 16, PANELS * 128);
  if (PANELS == 2) {
    _tile_stored(2, sums + 32, PANELS * 128);
    _tile_stored(3, sums + 48, PANELS * 128);
  }
}

// Two tiles of rows times one panel: sums [rows of the first, then of the second][ld].
void block(const uint8_t* a0, const uint8_t* a1, size_t stride, const uint8_t* w, int chunks, Tail& tail, float* s0,
           float* s1, int ld, const uint8_t* next, int lines) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < chunks; ++i) {
    const uint8_t* at = w + size_t(i) * kChunkBytes;
    for (int j = 0; j < lines; ++j, next += 64) _mm_prefetch((const char*)next, _MM_HINT_T1);
    _tile_loadd(4, a0 + size_t(i) * 64, stride);
    _tile_loadd(6, at, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, at + 64, 128);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1 + size_t(i) * 64, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  if (tail.pairs) {
    tail.take_weights(0, w + size_t(chunks) * kChunkBytes);
    _tile_loadd(4, tail.rows[0], 64);
    _tile_loadd(6, tail.weights[0], 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, tail.weights[0] + 64, 128);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, tail.rows[1], 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, s0, size_t(ld) * 4);
  _tile_stored(1, s0 + 16, size_t(ld) * 4);
  _tile_stored(2, s1, size_t(ld) * 4);
  _tile_stored(3, s1 + 16, size_t(ld) * 4);
}

void gemm(const GemmArgs& g) {
  const paceline::Kernels& base = paceline::kAvx512Bf16Kernels;
  if (g.w_f32) return base.gemm(g);
  const int pairs = (g.k + 1) / 2, chunks = pairs / kTilePairs;
  const size_t panel_bytes = size_t(pairs) * 128, stride = g.lda * 2;
  const int tiles = (g.rows + kTileRows - 1) / kTileRows, rows = (g.rows + tiles - 1) / tiles;
  const auto* a = static_cast<const uint8_t*>(g.a);
  const auto* weights = static_cast<const uint8_t*>(g.w);
  alignas(64) float sums[2 * kTileRows * 64];
  Tail tail;
  tail.pairs = pairs % kTilePairs;
  configure(rows, tiles > 1);
  for (int p = g.panel_begin; p < g.panel_end; p += 2) {
    const int panels = g.panel_end - p < 2 ? 1 : 2, width = panels * 32;
    const uint8_t* w0 = weights + size_t(p) * panel_bytes;
    const uint8_t* w1 = w0 + size_t(panels - 1) * panel_bytes;
    const bool last = p + panels >= g.panel_end;
    if (tiles == 1) {
      if (tail.pairs) tail.take_rows(0, a + size_t(chunks) * 64, stride, rows);
      const uint8_t* f0 = last ? (g.next_bytes ? g.next : w0) : w1 + panel_bytes;
      const uint8_t* f1 = last ? f0 : g.panel_end - p == 3 ? f0 : f0 + panel_bytes;
      if (panels == 2)
        thin<2>(a, stride, w0, w1, chunks, f0, f1, tail, sums);
      else
        thin<1>(a, stride, w0, w0, chunks, f0, f1, tail, sums);
      base.epilogue(g, sums, 0, rows, p, panels);
      continue;
    }
    // Every tile has `rows` rows: the last ones begin early enough, and what was computed before is passed over.
    const uint8_t* next = last ? g.next : w1 + panel_bytes;
    const size_t next_bytes = last ? g.next_bytes : size_t(g.panel_end - p - 2 < 2 ? 1 : 2) * panel_bytes;
    const int steps = (tiles + 1) / 2 * panels * (chunks ? chunks : 1);
    const int lines = int((next_bytes / 64 + size_t(steps) - 1) / size_t(steps));
    const uint8_t* ask_for = lines ? next : w0;
    for (int t = 0; t < tiles; t += 2) {
      const bool two = t + 1 < tiles;
      const auto begin = [&](int i) { return i * rows + rows <= g.rows ? i * rows : g.rows - rows; };
      const int r0 = begin(t), r1 = two ? begin(t + 1) : r0;
      const uint8_t *a0 = a + size_t(r0) * stride, *a1 = a + size_t(r1) * stride;
      if (tail.pairs) {
        tail.take_rows(0, a0 + size_t(chunks) * 64, stride, rows);
        tail.take_rows(1, a1 + size_t(chunks) * 64, stride, rows);
      }
      float* second = sums + rows * width;
      for (int i = 0; i < panels; ++i, ask_for += size_t(lines) * 64 * size_t(chunks))
        block(a0, a1, stride, i ? w1 : w0, chunks, tail, sums + i * 32, second + i * 32, width, ask_for, lines);
      const int skip0 = t * rows - r0;
      base.epilogue(g, sums + skip0 * width, r0 + skip0, rows - skip0, p, panels);
      if (two) {
        const int skip1 = (t + 1) * rows - r1;
        base.epilogue(g, second + skip1 * width, r1 + skip1, rows - skip1, p, panels);
      }
    }
  }
  _tile_release();
}

double peak_loop(long iterations, bool f32) {
  if (f32) return paceline::kAvx512Bf16Kernels.peak_loop(iterations, true);
  // values with many bits: a product of zeros draws less power, and the clock is faster for it
  alignas(64) uint16_t values[kTileRows * 32];
  for (int i = 0; i < kTileRows * 32; ++i) values[i] = uint16_t((i & 1 ? 0x3f80 : 0xbf80) + (i * 37 & 127));
  written(values);
  configure(kTileRows, true);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, values, 64);
  _tile_loadd(5, values, 64);
  _tile_loadd(6, values, 64);
  _tile_loadd(7, values, 64);
  for (long i = 0; i < iterations; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return double(iterations) * 4 * 16 * 16 * 32 * 2;
}

}  // namespace

namespace paceline {
void amx_gemm(const GemmArgs& g) { gemm(g); }
double amx_peak_loop(long iterations, bool f32) { return peak_loop(iterations, f32); }
}  // namespace paceline
#endif
