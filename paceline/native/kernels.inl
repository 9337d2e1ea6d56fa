// The kernels, written once over the sixteen-lane vector `V` and the operations `S` of one instruction set.
//
// Invariant 1 (design): a result never depends on which tile shape computed it. Each output of a matrix product is one
// accumulator that walks K in order; attention works on partitions of 64 keys at absolute positions and folds them in
// order; sums over a row use fixed lanes and a fixed tree. Keep it so: every new shape must walk in the same order.
//
// Everything lives in an unnamed namespace: see kernels.h.
#include <utility>

#include "kernels.h"
#include "vector_math.inl"

namespace {

using paceline::AttentionArgs;
using paceline::CacheType;
using paceline::Epilogue;
using paceline::GemmArgs;
using paceline::kKeysPerBlock;
using paceline::kMaxHeadDim;
using paceline::kPanel;
using paceline::kPartition;
using paceline::kStateHead;
using paceline::QkvPostArgs;
using paceline::QueryTile;

// Ahead of the stream of weights: covers memory latency also while a tile's results are written out.
constexpr int kPrefetchBytes = 8192;
// With two steps: this far ahead into the second-level cache, and from there into the first.
constexpr int kFarBytes = 16384, kNearBytes = 2048;
// Panels up to this size stay in the second-level cache, two at a time, while row tiles pass over them.
constexpr size_t kSharedPanelBytes = 128 << 10;
constexpr float kNegInf = -__builtin_inff();

// ---------------------------------------------------------------- matrix product

template <bool B, class X, class Y>
struct Pick {
  using type = X;
};
template <class X, class Y>
struct Pick<false, X, Y> {
  using type = Y;
};

// Rows of the activations, reachable with few address registers: row r is base[r / 3] + (r % 3) * stride.
template <class A, int MR>
struct Rows {
  const A* base[(MR + 2) / 3];
  size_t stride;
  Rows(const A* a, size_t lda) : stride(lda) {
    for (int i = 0; i < (MR + 2) / 3; ++i) base[i] = a + size_t(3) * i * lda;
  }
  inline const A* at(int r) const { return base[r / 3] + size_t(r % 3) * stride; }
};

#ifdef PACELINE_NARROW
void epilogue(const GemmArgs& g, const float* tmp, int row, int mr, int panel, int panels);
#include "narrow.inl"
#else
// Which lines to ask for while a tile runs: `step` bytes further per step of the walk, two lines each for a stream.
struct Prefetch {
  const uint8_t* at;
  size_t step;
};
enum Stream { kCached, kNear, kFar };  // weights are at hand; or come from memory, in one step or in two

// One tile: MR rows times NV vectors of columns (NV 2: one panel, 1: half a panel). w points at the first vector;
// steps counts k, or pairs of k for bf16 weights. Writes tmp [MR][ldt].
template <int MR, int NV, bool F32, Stream kStream>
inline void tile(const void* a, size_t lda, const uint8_t* w, int steps, float* tmp, int ldt, Prefetch next) {
  V acc[MR][NV];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = S::zero();
  constexpr bool kDot = S::kBf16Dot && !F32;
  using A = typename Pick<kDot, uint32_t, float>::type;
  const Rows<A, MR> rows(static_cast<const A*>(a), kDot ? lda / 2 : lda);
#pragma GCC unroll 2
  for (int i = 0; i < steps; ++i) {
    const uint8_t* at = w + size_t(i) * 128;
    if (kStream == kNear) {
      S::prefetch(next.at + size_t(i) * next.step);
      S::prefetch(next.at + size_t(i) * next.step + 64);
    } else if (kStream == kFar) {
      S::prefetch_far(next.at + size_t(i) * next.step);
      S::prefetch_far(next.at + size_t(i) * next.step + 64);
      S::prefetch(at + kNearBytes);
      S::prefetch(at + kNearBytes + 64);
    } else {
      S::prefetch_far(next.at + size_t(i) * next.step);
    }
    if constexpr (F32) {
      V wv[NV];
      for (int v = 0; v < NV; ++v) wv[v] = S::load(reinterpret_cast<const float*>(at + v * 64));
      for (int r = 0; r < MR; ++r) {
        const V x = S::set1(rows.at(r)[i]);
        for (int v = 0; v < NV; ++v) acc[r][v] = S::fma(wv[v], x, acc[r][v]);
      }
    } else {
      Pairs wv[NV];
      for (int v = 0; v < NV; ++v) wv[v] = S::load_pairs(reinterpret_cast<const uint16_t*>(at + v * 64));
#ifdef PACELINE_BF16_DOT
      for (int r = 0; r < MR; ++r) {
        const uint32_t x = rows.at(r)[i];
        for (int v = 0; v < NV; ++v) acc[r][v] = S::dot_pairs(acc[r][v], wv[v], x);
      }
#else
      V half[NV];
      for (int v = 0; v < NV; ++v) half[v] = S::even(wv[v]);
      for (int r = 0; r < MR; ++r) {
        const V x = S::set1(rows.at(r)[2 * i]);
        for (int v = 0; v < NV; ++v) acc[r][v] = S::fma(half[v], x, acc[r][v]);
      }
      for (int v = 0; v < NV; ++v) half[v] = S::odd(wv[v]);
      for (int r = 0; r < MR; ++r) {
        const V x = S::set1(rows.at(r)[2 * i + 1]);
        for (int v = 0; v < NV; ++v) acc[r][v] = S::fma(half[v], x, acc[r][v]);
      }
#endif
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) S::store(tmp + r * ldt + v * 16, acc[r][v]);
}

// One panel for MR rows: tmp [MR][ldt].
template <int MR, bool F32>
void panel_tile(const void* a, size_t lda, const uint8_t* w, int steps, float* tmp, int ldt, Prefetch next,
                Stream stream) {
  if constexpr (MR <= S::kPanelRows) {
    if (stream == kCached)
      tile<MR, 2, F32, kCached>(a, lda, w, steps, tmp, ldt, next);
    else if (stream == kNear)
      tile<MR, 2, F32, kNear>(a, lda, w, steps, tmp, ldt, next);
    else
      tile<MR, 2, F32, kFar>(a, lda, w, steps, tmp, ldt, next);
  } else {
    tile<MR, 1, F32, kNear>(a, lda, w, steps, tmp, ldt, next);
    tile<MR, 1, F32, kNear>(a, lda, w + 64, steps, tmp + 16, ldt, next);
  }
}

constexpr int kMaxTileRows = S::kPanelRows > S::kHalfRows ? S::kPanelRows : S::kHalfRows;

template <bool F32>
inline void panel_dispatch(int mr, const void* a, size_t lda, const uint8_t* w, int steps, float* tmp, int ldt,
                           Prefetch next, Stream stream) {
#define PL_CASE(N)                                                                                 \
  case N:                                                                                          \
    if constexpr (N <= kMaxTileRows) panel_tile<N, F32>(a, lda, w, steps, tmp, ldt, next, stream); \
    break
  switch (mr) {
    PL_CASE(1);
    PL_CASE(2);
    PL_CASE(3);
    PL_CASE(4);
    PL_CASE(5);
    PL_CASE(6);
    PL_CASE(7);
    PL_CASE(8);
    PL_CASE(9);
    PL_CASE(10);
    PL_CASE(11);
    PL_CASE(12);
  }
#undef PL_CASE
}
#endif

void epilogue(const GemmArgs& g, const float* tmp, int row, int mr, int panel, int panels) {
  const int width = panels * 32;
  if (g.epilogue == Epilogue::kSwiGLU || g.epilogue == Epilogue::kGeluTanh) {
    const int col = panel / 2 * 32;
    for (int r = 0; r < mr; ++r)
      for (int v = 0; v < 2 && col + v * 16 < g.n; ++v) {
        V gate = S::load(tmp + r * 64 + v * 16);
        V up = S::load(tmp + r * 64 + 32 + v * 16);
        const int left = g.n - (col + v * 16);
        if (g.bias) {
          gate = S::add(gate, load_part(g.bias + col + v * 16, left));
          up = S::add(up, load_part(g.bias + g.n + col + v * 16, left));
        }
        const V y = S::mul(g.epilogue == Epilogue::kSwiGLU ? silu_v(gate) : gelu_tanh_v(gate), up);
        store_act_part(g.act_out, size_t(row + r - g.act_row) * g.ld_act + size_t(col + v * 16 - g.act_column), g.act,
                       y, left);
      }
    return;
  }
  for (int r = 0; r < mr; ++r)
    for (int v = 0; v < width / 16; ++v) {
      const int col = panel * 32 + v * 16;
      const int left = g.n - col;
      if (left <= 0) break;
      V y = S::load(tmp + r * width + v * 16);
      if (g.bias) y = S::add(y, load_part(g.bias + col, left));
      float* out = g.out + size_t(row + r) * g.ldo + col;
      if (g.epilogue == Epilogue::kAdd) y = S::add(load_part(out, left), y);
      store_part(out, y, left);
    }
}

#ifndef PACELINE_NARROW
// Panels [panel_begin, panel_end) of the product for all rows, in pairs (a gated result needs both). One tile of rows
// streams the weights and prefetches its own stream. Several tiles find a pair of panels in the second-level cache,
// and meanwhile ask for the next pair, each for its share, so that memory never waits for arithmetic.
template <bool F32>
void gemm_t(const GemmArgs& g) {
  const int steps = F32 ? g.k : (g.k + 1) / 2;
  const size_t pstride = size_t(steps) * 128;
  const int tiles = (g.rows + kMaxTileRows - 1) / kMaxTileRows;
  const size_t item = F32 || !S::kBf16Dot ? 4 : 2;
  const bool share = tiles > 1 && pstride <= kSharedPanelBytes;
  const bool far = g.far_rows && g.rows >= g.far_rows * tiles;
  float tmp[kMaxTileRows * 64];
  for (int p = g.panel_begin; p < g.panel_end; p += 2) {
    const int panels = g.panel_end - p < 2 ? 1 : 2;
    const bool last = p + 2 >= g.panel_end;
    const uint8_t* follow = static_cast<const uint8_t*>(g.w) + size_t(p + 2) * pstride;
    const size_t follow_bytes = last ? g.next_bytes : size_t(g.panel_end - p - 2 < 2 ? 1 : 2) * pstride;
    if (last) follow = g.next;
    const uint8_t* w = static_cast<const uint8_t*>(g.w) + size_t(p) * pstride;
    for (int t = 0; t < tiles; ++t) {
      const int r0 = int(int64_t(g.rows) * t / tiles), r1 = int(int64_t(g.rows) * (t + 1) / tiles);
      const uint8_t* a = static_cast<const uint8_t*>(g.a) + size_t(r0) * g.lda * item;
      for (int i = 0; i < panels; ++i) {
        const uint8_t* at = w + i * pstride;
        const bool ahead = t == 0 && (p == g.panel_begin || !share);
        Prefetch next{at, 0};  // nothing new: a line that is at hand
        if (ahead) {
          next = {at + (far ? kFarBytes : kPrefetchBytes), 128};
        } else if (share && follow_bytes) {
          const size_t part = follow_bytes / size_t(panels * tiles);
          next = {follow + part * size_t(i * tiles + t), (part + size_t(steps) - 1) / size_t(steps)};
        }
        panel_dispatch<F32>(r1 - r0, a, g.lda, at, steps, tmp + i * 32, panels * 32, next,
                            !ahead ? kCached
                            : far  ? kFar
                                   : kNear);
      }
      epilogue(g, tmp, r0, r1 - r0, p, panels);
    }
  }
  if (!share)
    for (size_t i = 0; i < g.next_bytes && i < size_t(kPrefetchBytes); i += 64) S::prefetch(g.next + i);
}

#endif

void gemm(const GemmArgs& g) {
#ifdef PACELINE_NARROW
  if (g.w_f32)
    narrow_gemm<true>(g);
  else
    narrow_gemm<false>(g);
#else
  if (g.w_f32)
    gemm_t<true>(g);
  else
    gemm_t<false>(g);
#endif
}

// ---------------------------------------------------------------- norms

inline float inverse_rms(const float* x, int width, float eps) {
  V s0 = S::zero(), s1 = S::zero();
  int i = 0;
  for (; i + 32 <= width; i += 32) {
    const V a = S::load(x + i), b = S::load(x + i + 16);
    s0 = S::fma(a, a, s0);
    s1 = S::fma(b, b, s1);
  }
  for (; i < width; i += 16) {
    const V a = load_part(x + i, width - i);
    s0 = S::fma(a, a, s0);
  }
  return 1.0f / __builtin_sqrtf(lane_sum(S::add(s0, s1)) / float(width) + eps);
}

template <class Put>
inline void norm_row(const float* x, int width, const float* weight, float eps, Put put) {
  if (!weight) {
    for (int i = 0; i < width; i += 16) put(i, load_part(x + i, width - i), width - i);
    return;
  }
  const V scale = S::set1(inverse_rms(x, width, eps));
  for (int i = 0; i < width; i += 16) {
    const int left = width - i;
    put(i, S::mul(S::mul(load_part(x + i, left), scale), load_part(weight + i, left)), left);
  }
}

void norm_rows(const float* x, size_t ldx, int width, const float* weight, float eps, void* act, size_t lda, Act mode,
               int begin, int end) {
  for (int r = begin; r < end; ++r)
    norm_row(x + r * ldx, width, weight, eps,
             [&](int i, V y, int left) { store_act_part(act, r * lda + i, mode, y, left); });
}

// ---------------------------------------------------------------- rope and the cache

inline int padded(int n) { return (n + 15) / 16 * 16; }

// Rotates pairs of y in place: (i, i + half), or (2i, 2i + 1) when interleaved.
inline void rotate(float* y, const float* c, const float* s, int half, bool interleaved) {
  if (interleaved) {
    for (int i = 0; i < half; ++i) {
      const float a = y[2 * i], b = y[2 * i + 1];
      y[2 * i] = a * c[i] - b * s[i];
      y[2 * i + 1] = b * c[i] + a * s[i];
    }
    return;
  }
  for (int i = 0; i < half; i += 16) {
    const int left = half - i;
    const V a = load_part(y + i, left), b = load_part(y + half + i, left);
    const V vc = load_part(c + i, left), vs = load_part(s + i, left);
    store_part(y + i, S::sub(S::mul(a, vc), S::mul(b, vs)), left);
    store_part(y + half + i, S::add(S::mul(b, vc), S::mul(a, vs)), left);
  }
}

#include "int8_cache.inl"

// Key block layout: [head_dim / 2][16 keys][2] bf16, or [head_dim][16 keys] fp32. Value block: [16 keys][padded
// head_dim].
void qkv_post(const QkvPostArgs& p, int row, int h, int block, int slot) {
  const int hd = p.head_dim, half = p.rotary_dim / 2;
  const float* src = p.qkv + size_t(row) * p.ld + size_t(h) * hd;
  const bool is_q = h < p.heads, is_k = !is_q && h < p.heads + p.kv_heads;
  float y[kMaxHeadDim];
  if (is_q || is_k) {
    const float* norm = is_q ? p.q_norm : p.k_norm;
    norm_row(src, hd, norm, p.eps, [&](int i, V v, int left) { store_part(y + i, v, left); });
    rotate(y, p.cos + size_t(row) * half, p.sin + size_t(row) * half, half, p.interleaved_rope);
  }
  if (is_q) {
    if (p.cache_type == CacheType::kInt8) {
      const size_t item = p.act == Act::kBF16 ? 2 : 4;
      return store_int8_query(y, hd, static_cast<uint8_t*>(p.q_out) + (size_t(row) * p.ld_q + size_t(h) * hd) * item);
    }
    for (int i = 0; i < hd; i += 16)
      store_act_part(p.q_out, size_t(row) * p.ld_q + size_t(h) * hd + i, p.act, load_part(y + i, hd - i), hd - i);
    return;
  }
  const int kv = is_k ? h - p.heads : h - p.heads - p.kv_heads;
  uint8_t* base = p.cache + (size_t(block) * p.kv_heads + kv) * p.block_bytes;
  if (p.cache_type == CacheType::kInt8)
    return is_k ? store_int8_key(y, hd, base, slot) : store_int8_value(src, hd, base, slot);
  if (is_k) {
    if (p.cache_type == CacheType::kF32) {
      float* k = reinterpret_cast<float*>(base);
      for (int d = 0; d < hd; ++d) k[d * kKeysPerBlock + slot] = y[d];
    } else {
      uint16_t* k = reinterpret_cast<uint16_t*>(base);
      for (int i = 0; i < hd; i += 16) {
        uint16_t t[16];
        S::store_bf16(t, load_part(y + i, hd - i));
        for (int d = i; d < hd && d < i + 16; ++d) k[(d / 2 * kKeysPerBlock + slot) * 2 + (d & 1)] = t[d - i];
      }
    }
    return;
  }
  const size_t width = padded(hd);
  if (p.cache_type == CacheType::kF32) {
    float* v = reinterpret_cast<float*>(base) + size_t(hd) * kKeysPerBlock + slot * width;
    for (int i = 0; i < hd; i += 16) S::store(v + i, load_part(src + i, hd - i));
  } else {
    uint16_t* v = reinterpret_cast<uint16_t*>(base) + size_t(hd) * kKeysPerBlock + slot * width;
    for (int i = 0; i < hd; i += 16) S::store_bf16(v + i, load_part(src + i, hd - i));
  }
}

// ---------------------------------------------------------------- attention

#include "attention.inl"

// ---------------------------------------------------------------- between products

#include "elementwise.inl"

// ---------------------------------------------------------------- floors

double peak_loop(long iterations, bool f32) {
  // loops over the accumulators are unrolled so that these live in registers
  constexpr int n = S::kPeakSums;
  V acc[n];
#pragma GCC unroll 24
  for (int j = 0; j < n; ++j) acc[j] = S::distinct(float(j));  // or they would be computed once
  const V w = S::set1(1e-9f);
#ifdef PACELINE_BF16_DOT
  if (!f32) {
    const Pairs wp = _mm512_set1_epi32(0x3f803f80);
    for (long i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
      for (int j = 0; j < n; ++j) acc[j] = S::dot_pairs(acc[j], wp, 0x3f803f80u);
    }
  } else
#endif
    for (long i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
      for (int j = 0; j < n; ++j) acc[j] = S::fma(w, w, acc[j]);
    }
#pragma GCC unroll 24
  for (int j = 1; j < n; ++j) acc[0] = S::add(acc[0], acc[j]);
  volatile float sink = lane_sum(acc[0]);
  (void)sink;
  const bool dot = S::kBf16Dot && !f32;
  return double(iterations) * n * 16 * (dot ? 4 : 2);
}

uint64_t read_loop(const uint8_t* p, size_t bytes, int prefetch_bytes) {
  V acc[8];
  for (auto& x : acc) x = S::zero();
  for (size_t i = 0; i + 512 <= bytes; i += 512)
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      if (prefetch_bytes) S::prefetch(p + i + j * 64 + prefetch_bytes);
      acc[j] = S::add(acc[j], S::load(reinterpret_cast<const float*>(p + i + j * 64)));
    }
  for (int j = 1; j < 8; ++j) acc[0] = S::add(acc[0], acc[j]);
  return uint64_t(lane_sum(acc[0]) != 0.0f);
}

}  // namespace

namespace paceline {
extern const Kernels PACELINE_KERNELS;
const Kernels PACELINE_KERNELS = {
    S::kName, S::kQueryTile, S::kBf16Dot, gemm,        epilogue, norm_rows, qkv_post,  attend,
    merge,    finish,        gate_row,    softcap_row, add_row,  peak_loop, read_loop,
};
}  // namespace paceline
