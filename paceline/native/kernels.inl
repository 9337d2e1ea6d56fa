// The kernels, written once over the sixteen-lane vector `V` and the operations `S` of one instruction set.
//
// Invariant 1 (design): a result never depends on which tile shape computed it. Each output of a matrix product is one
// accumulator that walks K in order; attention works on partitions of 64 keys at absolute positions and folds them in
// order; sums over a row use fixed lanes and a fixed tree. Keep it so: every new shape must walk in the same order.
//
// Everything lives in an unnamed namespace: see kernels.h.
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
// Tiles of fewer rows wait for memory anyway, and the second prefetch only costs.
constexpr int kFarRows = 6;
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
    else if (MR < kFarRows || stream == kNear)
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
        store_act_part(g.act_out, size_t(row + r) * g.ld_act + col + v * 16, g.act, y, left);
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
  const bool far = g.far_prefetch && g.rows >= kFarRows * tiles;
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

void gemm(const GemmArgs& g) {
  if (g.w_f32)
    gemm_t<true>(g);
  else
    gemm_t<false>(g);
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

// Scores of TQ query vectors against the first NB blocks of a partition: out [TQ][64], unscaled.
template <int TQ, bool F32, int NB>
inline void scores_t(const AttentionArgs& p, const void* const* q, const uint8_t* const* blocks, float* out) {
  V acc[TQ][NB];
  for (int r = 0; r < TQ; ++r)
    for (int b = 0; b < NB; ++b) acc[r][b] = S::zero();
  if constexpr (F32) {
    for (int d = 0; d < p.head_dim; ++d) {
      V k[NB];
      for (int b = 0; b < NB; ++b) k[b] = S::load(reinterpret_cast<const float*>(blocks[b]) + d * 16);
      for (int r = 0; r < TQ; ++r) {
        const V x = S::set1(static_cast<const float*>(q[r])[d]);
        for (int b = 0; b < NB; ++b) acc[r][b] = S::fma(k[b], x, acc[r][b]);
      }
    }
  } else {
    for (int d = 0; d < p.head_dim / 2; ++d) {
      Pairs k[NB];
      for (int b = 0; b < NB; ++b) k[b] = S::load_pairs(reinterpret_cast<const uint16_t*>(blocks[b]) + d * 32);
      for (int r = 0; r < TQ; ++r) {
#ifdef PACELINE_BF16_DOT
        const uint32_t x = static_cast<const uint32_t*>(q[r])[d];
        for (int b = 0; b < NB; ++b) acc[r][b] = S::dot_pairs(acc[r][b], k[b], x);
#else
        const V x0 = S::set1(static_cast<const float*>(q[r])[2 * d]);
        const V x1 = S::set1(static_cast<const float*>(q[r])[2 * d + 1]);
        for (int b = 0; b < NB; ++b) acc[r][b] = S::fma(S::odd(k[b]), x1, S::fma(S::even(k[b]), x0, acc[r][b]));
#endif
      }
    }
  }
  for (int r = 0; r < TQ; ++r)
    for (int b = 0; b < NB; ++b) S::store(out + r * kPartition + b * 16, acc[r][b]);
}

// Weighted values: out [TQ][ld] for lanes [d, d + 16 * NV), over keys [k0, k1) of the partition.
// Meanwhile `step` bytes per key are asked for from the blocks in `next` (null: nothing).
template <int TQ, int NV, CacheType kType>
inline void values_t(const uint8_t* const* blocks, size_t value_offset, size_t width, const float* prob, int k0, int k1,
                     int d, float* out, size_t ld, const uint8_t* const* next, size_t step) {
  V acc[TQ][NV];
  for (int r = 0; r < TQ; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = S::zero();
  for (int j = k0; j < k1; ++j) {
    const uint8_t* base = blocks[j / 16];
    if (next)
      for (size_t i = 0; i < step; i += 64) S::prefetch_far(next[j / 16] + size_t(j % 16) * step + i);
    V x[NV];
    for (int v = 0; v < NV; ++v) {
      const size_t at = value_offset + size_t(j % 16) * width + d + v * 16;
      x[v] = kType == CacheType::kInt8  ? S::load_int8(reinterpret_cast<const int8_t*>(base) + at)
             : kType == CacheType::kF32 ? S::load(reinterpret_cast<const float*>(base) + at)
                                        : S::load_bf16(reinterpret_cast<const uint16_t*>(base) + at);
    }
    for (int r = 0; r < TQ; ++r) {
      const V w = S::set1(prob[r * kPartition + j]);
      for (int v = 0; v < NV; ++v) acc[r][v] = S::fma(x[v], w, acc[r][v]);
    }
  }
  for (int r = 0; r < TQ; ++r)
    for (int v = 0; v < NV; ++v) S::store(out + r * ld + d + v * 16, acc[r][v]);
}

// state and partial: [max, sum, pad to 16 lanes, values...]: fold partial in behind state.
void merge(float* state, const float* partial, int head_dim) {
  const int end = kStateHead + padded(head_dim);
  if (partial[0] == kNegInf) return;
  if (state[0] == kNegInf) {  // nothing yet: what follows would multiply by exactly 0 and 1
    for (int i = 0; i < end; i += 16) S::store(state + i, S::load(partial + i));
    return;
  }
  const float top = state[0] > partial[0] ? state[0] : partial[0];
  float t[16] = {state[0] - top, partial[0] - top};
  S::store(t, exp_v(S::load(t)));
  const V a = S::set1(t[0]), b = S::set1(t[1]);
  for (int i = kStateHead; i < end; i += 16)
    S::store(state + i, S::fma(S::load(partial + i), b, S::mul(S::load(state + i), a)));
  state[1] = state[1] * t[0] + partial[1] * t[1];
  state[0] = top;
}

template <int TQ, CacheType kType, int NB>
inline void any_scores_t(const AttentionArgs& p, const void* const* q, const uint8_t* const* blocks, float* out) {
  if constexpr (kType == CacheType::kInt8)
    int8_scores_t<TQ, NB>(p, q, blocks, out);
  else
    scores_t<TQ, kType == CacheType::kF32, NB>(p, q, blocks, out);
}

template <int TQ, CacheType kType>
void attend_t(const AttentionArgs& p, const QueryTile& t, const int32_t* table, int p0, int p1, float* state) {
  constexpr bool kInt8 = kType == CacheType::kInt8;
  const size_t width = padded(p.head_dim);
  const size_t ld = kStateHead + width;
  const size_t item = p.act == Act::kBF16 ? 2 : 4;
  const void* q[TQ];
  int last = -1, first = t.first[0];
  for (int r = 0; r < TQ; ++r) {
    q[r] = static_cast<const uint8_t*>(p.q) + (size_t(t.row[r]) * p.ld_q + size_t(t.head[r]) * p.head_dim) * item;
    last = t.last[r] > last ? t.last[r] : last;
    first = t.first[r] < first ? t.first[r] : first;
    for (size_t i = 0; i < ld; i += 16) S::store(state + r * ld + i, S::zero());
    state[r * ld] = kNegInf;
  }
  float score[TQ * kPartition];
  float partial[TQ * (kStateHead + kMaxHeadDim)];
  for (int part = p0; part < p1; ++part) {
    const int base = part * kPartition;
    if (base > last || base + kPartition <= first) continue;
    const int used = last - base + 1 < kPartition ? last - base + 1 : kPartition;
    const int skip = first > base ? first - base : 0;
    const uint8_t* blocks[4];
    for (int b = 0; b < 4; ++b) {
      // blocks past the end are never read by a kept lane: point them at a block that exists
      const int index = b * 16 < used ? part * 4 + b : part * 4;
      blocks[b] = p.cache + (size_t(table[index]) * p.kv_heads + t.kv_head) * p.block_bytes;
    }
    // ask for everything the partition reads: few bytes from many places, which no stream detector foresees
    for (int b = 0; b * 16 < used; ++b)
      for (size_t line = 0; line < p.block_bytes; line += 64) S::prefetch(blocks[b] + line);
    // and, while values are added up, for the next one, so that a long context streams
    const bool more = base + 2 * kPartition - 1 <= last;
    const uint8_t* next[4] = {};
    for (int b = 0; more && b < 4; ++b)
      next[b] = p.cache + (size_t(table[part * 4 + 4 + b]) * p.kv_heads + t.kv_head) * p.block_bytes;
    const size_t step = p.block_bytes / kKeysPerBlock;
    const int filled = (used + 15) / 16;  // blocks; lanes of the others would be masked
    if (filled == 1)
      any_scores_t<TQ, kType, 1>(p, q, blocks, score);
    else if (filled == 2)
      any_scores_t<TQ, kType, 2>(p, q, blocks, score);
    else
      any_scores_t<TQ, kType, 4>(p, q, blocks, score);
    for (int r = 0; r < TQ; ++r) {
      V s[4], m = S::set1(kNegInf);
      for (int b = 0; b < filled; ++b) {
        const int at = base + b * 16;
        s[b] = S::mul(S::load(score + r * kPartition + b * 16), S::set1(p.scale));
        if (p.softcap > 0.0f) s[b] = S::mul(tanh_v(S::div(s[b], S::set1(p.softcap))), S::set1(p.softcap));
        s[b] = S::keep(s[b], t.first[r] - at, t.last[r] - at + 1, kNegInf);
        m = S::max(m, s[b]);
      }
      const float top = lane_max(m);
      partial[r * ld] = top;
      V sum = S::zero();
      for (int b = 0; b < filled; ++b) {
        const V e = top == kNegInf ? S::zero() : exp_v(S::sub(s[b], S::set1(top)));
        sum = S::add(sum, e);
        S::store(score + r * kPartition + b * 16, kInt8 ? S::mul(e, value_scales(blocks[b], p.head_dim)) : e);
      }
      partial[r * ld + 1] = lane_sum(sum);
    }
    const size_t offset = kInt8 ? int8_value_offset(p.head_dim) : size_t(p.head_dim) * kKeysPerBlock;
    size_t d = 0;
    for (; d + 64 <= width; d += 64)
      values_t<TQ, 4, kType>(blocks, offset, width, score, skip, used, int(d), partial + kStateHead, ld,
                             more && d == 0 ? next : nullptr, step);
    for (; d < width; d += 16)
      values_t<TQ, 1, kType>(blocks, offset, width, score, skip, used, int(d), partial + kStateHead, ld, nullptr, step);
    for (int r = 0; r < TQ; ++r) merge(state + r * ld, partial + r * ld, p.head_dim);
  }
}

void attend(const AttentionArgs& p, const QueryTile& t, const int32_t* table, int p0, int p1, float* state) {
#define PL_CASE(N)                                                 \
  case N:                                                          \
    if constexpr (N <= S::kQueryTile) {                            \
      if (p.cache_type == CacheType::kInt8)                        \
        attend_t<N, CacheType::kInt8>(p, t, table, p0, p1, state); \
      else if (p.cache_type == CacheType::kF32)                    \
        attend_t<N, CacheType::kF32>(p, t, table, p0, p1, state);  \
      else                                                         \
        attend_t<N, CacheType::kBF16>(p, t, table, p0, p1, state); \
    }                                                              \
    break
  switch (t.count) {
    PL_CASE(1);
    PL_CASE(2);
    PL_CASE(3);
    PL_CASE(4);
    PL_CASE(5);
    PL_CASE(6);
  }
#undef PL_CASE
}

void finish(const AttentionArgs& p, const float* state, int row, int head) {
  const V total = S::set1(state[1]);
  for (int i = 0; i < p.head_dim; i += 16)
    store_act_part(p.out, size_t(row) * p.ld_out + size_t(head) * p.head_dim + i, p.act,
                   S::div(S::load(state + kStateHead + i), total), p.head_dim - i);
}

// ---------------------------------------------------------------- between products

#include "elementwise.inl"

// ---------------------------------------------------------------- floors

double peak_loop(long iterations, bool f32) {
  // loops over the accumulators are unrolled so that these live in registers
  V acc[24];
#pragma GCC unroll 24
  for (int j = 0; j < 24; ++j) acc[j] = S::set1(float(j));  // distinct, or they would be computed once
  const V w = S::set1(1e-9f);
#ifdef PACELINE_BF16_DOT
  if (!f32) {
    const Pairs wp = _mm512_set1_epi32(0x3f803f80);
    for (long i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
      for (int j = 0; j < 24; ++j) acc[j] = S::dot_pairs(acc[j], wp, 0x3f803f80u);
    }
  } else
#endif
    for (long i = 0; i < iterations; ++i) {
#pragma GCC unroll 24
      for (int j = 0; j < 24; ++j) acc[j] = S::fma(w, w, acc[j]);
    }
#pragma GCC unroll 24
  for (int j = 1; j < 24; ++j) acc[0] = S::add(acc[0], acc[j]);
  volatile float sink = lane_sum(acc[0]);
  (void)sink;
  const bool dot = S::kBf16Dot && !f32;
  return double(iterations) * 24 * 16 * (dot ? 4 : 2);
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
