// Attention over a bf16 cache with the tile unit (AMX): scores and weighted values are tile products of up to sixteen
// query vectors, whatever rows and heads these belong to.
//
// Invariant 1 (design): a row of a tile product never depends on the other rows. Keys that a vector does not see weigh
// exactly zero, and all 64 keys of a partition are always gone through. Partitions are folded in as in kernels.inl.
// A weight goes into its products as the sum of two bf16 values, so that 16 bits of it count.
//
// A key block is made of tiles as it is: [head_dim / 2][16 keys][2]. Values lie key by key; here pairs of keys are
// interleaved, which leaves the columns of a state in an order of their own (by 32) until `finish` undoes it.
#if defined(__x86_64__) && defined(PACELINE_AMX)
#define PACELINE_BF16_DOT 1
// clang-format off: the functions of vectors need the vectors
#include "simd_avx512.h"
#include "vector_math.inl"
// clang-format on
#include "amx.h"
#include "amx_tiles.h"

namespace {

using paceline::AttentionArgs;
using paceline::CacheType;
using paceline::kKeysPerBlock;
using paceline::kMaxHeadDim;
using paceline::kMaxQueryTile;
using paceline::kPartition;
using paceline::kStateHead;
using paceline::QueryTile;

constexpr int kTileRows = 16;             // of a second operand: pairs of k
constexpr size_t kTileValues = 16 * 32;   // bf16
constexpr int kBlocks = kPartition / 16;  // of keys in a partition
constexpr float kNegInf = -__builtin_inff();
static_assert(kKeysPerBlock == 16 && kPartition == 64 && kMaxQueryTile == 16, "tiles are cut from these");

const paceline::Kernels& other() { return paceline::kAvx512Bf16Kernels; }

bool has_tiles(const AttentionArgs& p) {
  return p.cache_type == CacheType::kBF16 && p.act == Act::kBF16 && p.head_dim % 32 == 0;
}

// 2^x for x <= 0, relative error below 3e-6, exactly 1 for 0; 2^-125 below that; 0 in the other lanes.
inline V exp2_v(__mmask16 lanes, V x) {
  const V y = _mm512_max_ps(S::set1(-125.0f), x);  // NaN stays, as the second operand
  const V n = S::nearest(y), f = S::sub(y, n);
  V p = S::fma(S::set1(0.009582852944731712f), f, S::set1(0.055906426161527634f));
  p = S::fma(p, f, S::set1(0.24024099111557007f));
  p = S::fma(p, f, S::set1(0.6931241750717163f));
  p = S::fma(p, f, S::set1(1.0f));
  return _mm512_maskz_scalef_ps(lanes, p, n);
}

inline __mmask16 visible(int first, int last, int at) {  // lanes of keys [first, last] in a block that begins at `at`
  const int lo = first - at < 0 ? 0 : first - at > 16 ? 16 : first - at;
  const int hi = last - at + 1 < 0 ? 0 : last - at + 1 > 16 ? 16 : last - at + 1;
  return __mmask16(((1u << hi) - 1) & ~((1u << lo) - 1));
}

// What one call works on; tile operands on lines of their own.
struct Work {
  alignas(64) uint16_t query[kMaxQueryTile * kMaxHeadDim];
  alignas(64) float score[kMaxQueryTile * kPartition];
  alignas(64) uint16_t weight[2][kMaxQueryTile * kPartition];  // cut to bf16, and what is left
  alignas(64) uint16_t values[kPartition * kMaxHeadDim];       // [2 halves of the keys][head_dim / 16][16 pairs][16][2]
  alignas(64) float sum[kMaxQueryTile * kMaxHeadDim];          // weighted values of the partition
  alignas(64) float top[kMaxQueryTile], total[kMaxQueryTile];
};

// Where the keys and values of a partition lie: its blocks, and of which keys something is seen.
struct Part {
  const uint8_t* block[kBlocks];
  int used;             // blocks of which something is seen, or that lie before one
  int key, begin, end;  // the first key; of those seen, counted from it
};

// What to ask memory for, a few lines of each block at a time.
struct Ahead {
  const Part* part = nullptr;  // null: nothing
  size_t bytes = 0, at = 0;    // of a block

  void ask(size_t lines) {
    if (!part) return;
    for (const size_t to = at + lines * 64 < bytes ? at + lines * 64 : bytes; at < to; at += 64)
      for (int b = 0; b < part->used; ++b) S::prefetch(part->block[b] + at);
  }
};

// score [count][64]: queries times the keys of four blocks.
inline void scores(Work& w, int head_dim, const Part& part) {
  const uint8_t* const* blocks = part.block;
  written(w.query);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int c = 0; c < head_dim / 32; ++c) {
    const size_t at = size_t(c) * kTileValues * 2;
    _tile_loadd(4, w.query + c * 32, size_t(head_dim) * 2);
    _tile_loadd(6, blocks[0] + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, blocks[1] + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, blocks[2] + at, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, blocks[3] + at, 64);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, w.score, kPartition * 4);
  _tile_stored(1, w.score + 16, kPartition * 4);
  _tile_stored(2, w.score + 32, kPartition * 4);
  _tile_stored(3, w.score + 48, kPartition * 4);
  written(w.score);
}

// Four registers -> four results of `fold` over their lanes, the same tree for each.
template <class Fold>
inline __m128 reduce(const V* x, Fold fold) {
  const V a = fold(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const V b = fold(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  V e = fold(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  e = fold(e, _mm512_shuffle_f32x4(e, e, 0x4e));
  e = fold(e, _mm512_shuffle_f32x4(e, e, 0xb1));
  return _mm512_castps512_ps128(e);
}

// Caps the scores if they are to be; without `all`, those of keys that a vector does not see become minus infinity.
inline void mask(Work& w, const AttentionArgs& p, const QueryTile& t, const Part& part, bool all) {
  for (int r = 0; r < t.count; ++r)
    for (int b = 0; b < kBlocks; ++b) {
      float* at = w.score + r * kPartition + b * 16;
      V x = S::load(at);
      if (p.softcap > 0.0f) {
        const V cap = S::set1(p.softcap);
        x = S::mul(tanh_v(S::div(S::mul(x, S::set1(p.scale)), cap)), cap);
      }
      if (!all) {
        const __mmask16 seen = visible(t.first[r], t.last[r], part.key + b * 16);
        x = _mm512_mask_mov_ps(S::set1(kNegInf), seen, x);
      }
      S::store(at, x);
    }
}

// Scores -> weights, their sums and the largest scores, vectors by four: the rest of the last four is computed as well.
inline void soften(Work& w, float scale, int count, Ahead& ahead) {
  const float factor = scale * 1.44269504088896341f;
  const __m512i high = _mm512_set1_epi32(int(0xffff0000u)), half = _mm512_set1_epi32(0x8000);
  const size_t lines = (ahead.bytes / 64 + size_t(count) - 1) / size_t(count);
  for (int r = 0; r < count; r += 4) {
    V x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const float* at = w.score + (r + i) * kPartition;
      x[i] = S::max(S::max(S::load(at), S::load(at + 16)), S::max(S::load(at + 32), S::load(at + 48)));
    }
    const __m128 top = reduce(x, [](V a, V b) { return S::max(a, b); });
    const __m128 from = _mm_mul_ps(_mm_max_ps(top, _mm_set1_ps(-3e38f)), _mm_set1_ps(-factor));
    alignas(16) float offset[4];
    _mm_store_ps(offset, from);
    _mm_store_ps(w.top + r, _mm_mul_ps(top, _mm_set1_ps(scale)));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const float* at = w.score + (r + i) * kPartition;
      ahead.ask(lines);
      V e[kBlocks];
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const V s = S::load(at + b * 16);
        const __mmask16 seen = _mm512_cmp_ps_mask(s, S::set1(kNegInf), _CMP_NEQ_UQ);
        e[b] = exp2_v(seen, S::fma(s, S::set1(factor), S::set1(offset[i])));
      }
      x[i] = S::add(S::add(e[0], e[1]), S::add(e[2], e[3]));
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; b += 2) {  // pairs of keys: one of each block
        const __m512i u0 = _mm512_castps_si512(e[b]), u1 = _mm512_castps_si512(e[b + 1]);
        const __m512i h0 = _mm512_and_si512(u0, high), h1 = _mm512_and_si512(u1, high);
        const __m512i l0 = _mm512_add_epi32(_mm512_castps_si512(S::sub(e[b], _mm512_castsi512_ps(h0))), half);
        const __m512i l1 = _mm512_add_epi32(_mm512_castps_si512(S::sub(e[b + 1], _mm512_castsi512_ps(h1))), half);
        constexpr __mmask32 odd = 0xaaaaaaaau;
        const int to = (r + i) * kPartition + b * 16;
        _mm512_store_si512(w.weight[0] + to, _mm512_mask_mov_epi16(_mm512_srli_epi32(u0, 16), odd, u1));
        _mm512_store_si512(w.weight[1] + to, _mm512_mask_mov_epi16(_mm512_srli_epi32(l0, 16), odd, l1));
      }
    }
    _mm_store_ps(w.total + r, reduce(x, [](V a, V b) { return S::add(a, b); }));
  }
}

// Values as tiles, a key of one block beside that of the next; zeros for keys that nobody sees.
inline void interleave(Work& w, int head_dim, const Part& part) {
  const size_t tiles = size_t(head_dim) / 16;
  for (int two = 0; two < 2; ++two)
    for (int slot = 0; slot < kKeysPerBlock; ++slot) {
      const auto from = [&](int b) {
        return reinterpret_cast<const uint16_t*>(part.block[b]) + size_t(kKeysPerBlock + slot) * size_t(head_dim);
      };
      const auto seen = [&](int b) {
        const int key = b * kKeysPerBlock + slot;
        return key >= part.begin && key < part.end ? ~__mmask32(0) : __mmask32(0);
      };
      const uint16_t *a = from(2 * two), *b = from(2 * two + 1);
      const __mmask32 has_a = seen(2 * two), has_b = seen(2 * two + 1);
      uint16_t* to = w.values + size_t(two) * tiles * kTileValues + size_t(slot) * 32;
      for (int d = 0; d < head_dim; d += 32, to += 2 * kTileValues) {
        const __m512i x = _mm512_maskz_loadu_epi16(has_a, a + d), y = _mm512_maskz_loadu_epi16(has_b, b + d);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(to + kTileValues, _mm512_unpackhi_epi16(x, y));
      }
    }
}

// Columns [0, 32 kPairs) of `sum` [count][head_dim]: weights times values from tile `v` on.
template <int kPairs>
inline void weigh_columns(Work& w, int head_dim, const uint16_t* v, float* sum) {
  const size_t half = size_t(head_dim) / 16 * kTileValues, stride = size_t(head_dim) * 4;
  _tile_zero(0);
  _tile_zero(1);
  if (kPairs == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < 2; ++i, v += half) {
    _tile_loadd(4, w.weight[0] + i * 32, kPartition * 2);
    _tile_loadd(5, w.weight[1] + i * 32, kPartition * 2);
    _tile_loadd(6, v, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, v + kTileValues, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(0, 5, 6);
    _tile_dpbf16ps(1, 5, 7);
    if (kPairs == 2) {
      _tile_loadd(6, v + 2 * kTileValues, 64);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, v + 3 * kTileValues, 64);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sum, stride);
  _tile_stored(1, sum + 16, stride);
  if (kPairs == 2) {
    _tile_stored(2, sum + 32, stride);
    _tile_stored(3, sum + 48, stride);
  }
}

inline void weigh(Work& w, int head_dim) {
  written(w.weight);
  written(w.values);
  int d = 0;
  for (; d + 64 <= head_dim; d += 64) weigh_columns<2>(w, head_dim, w.values + d * 32, w.sum + d);
  if (d < head_dim) weigh_columns<1>(w, head_dim, w.values + d * 32, w.sum + d);
  written(w.sum);
}

// Folds the partition into the states: the operations of `merge` in kernels.inl, the exponentials of all at once.
inline void fold(Work& w, int count, int head_dim, float* states, size_t ld) {
  alignas(64) float before[16] = {}, after[16] = {};
  for (int r = 0; r < count; ++r) {
    const float top = states[size_t(r) * ld] > w.top[r] ? states[size_t(r) * ld] : w.top[r];
    before[r] = states[size_t(r) * ld] - top;
    after[r] = w.top[r] - top;
  }
  S::store(before, exp_v(S::load(before)));
  S::store(after, exp_v(S::load(after)));
  for (int r = 0; r < count; ++r) {
    float* state = states + size_t(r) * ld;
    float* to = state + kStateHead;
    const float* from = w.sum + r * head_dim;
    if (w.top[r] == kNegInf) continue;
    if (state[0] == kNegInf) {
      for (int i = 0; i < head_dim; i += 16) S::store(to + i, S::load(from + i));
      state[0] = w.top[r];
      state[1] = w.total[r];
      continue;
    }
    const V a = S::set1(before[r]), b = S::set1(after[r]);
    for (int i = 0; i < head_dim; i += 16) S::store(to + i, S::fma(S::load(from + i), b, S::mul(S::load(to + i), a)));
    state[1] = state[1] * before[r] + w.total[r] * after[r];
    state[0] = state[0] > w.top[r] ? state[0] : w.top[r];
  }
}

void attend_tiles(const AttentionArgs& p, const QueryTile& t, const int32_t* table, int p0, int p1, float* state) {
  const int head_dim = p.head_dim;
  const size_t ld = size_t(kStateHead + head_dim);
  Work w;
  int first = t.first[0], last = t.last[0], all_from = t.first[0], all_to = t.last[0];
  for (int r = 0; r < t.count; ++r) {
    const auto* q = static_cast<const uint16_t*>(p.q) + size_t(t.row[r]) * p.ld_q + size_t(t.head[r]) * head_dim;
    std::memcpy(w.query + r * head_dim, q, size_t(head_dim) * 2);
    first = t.first[r] < first ? t.first[r] : first;
    last = t.last[r] > last ? t.last[r] : last;
    all_from = t.first[r] > all_from ? t.first[r] : all_from;
    all_to = t.last[r] < all_to ? t.last[r] : all_to;
    for (size_t i = 0; i < ld; i += 16) S::store(state + r * ld + i, S::zero());
    state[r * ld] = kNegInf;
  }
  p0 = first / kPartition > p0 ? first / kPartition : p0;
  p1 = last / kPartition + 1 < p1 ? last / kPartition + 1 : p1;
  if (p0 >= p1) return;
  const auto part_at = [&](int index) {
    Part part;
    part.key = index * kPartition;
    part.begin = first > part.key ? first - part.key : 0;
    part.end = last - part.key + 1 < kPartition ? last - part.key + 1 : kPartition;
    part.used = (part.end + kKeysPerBlock - 1) / kKeysPerBlock;
    for (int b = 0; b < kBlocks; ++b) {  // for blocks behind the end, one that exists: nothing of it is kept
      const int32_t block = table[index * kBlocks + (b < part.used ? b : 0)];
      part.block[b] = p.cache + (size_t(block) * size_t(p.kv_heads) + size_t(t.kv_head)) * p.block_bytes;
    }
    return part;
  };
  for (int i = t.count * kPartition; i % (4 * kPartition); ++i) w.score[i] = 0;
  TileConfig c;  // 0 to 3: sums; 4 and 5: queries, weights; 6 and 7: keys, values
  for (int i = 0; i < 8; ++i) c.set(i, i < 6 ? t.count : kTileRows, 64);
  c.load();
  Part part = part_at(p0), next;
  Ahead{&part, p.block_bytes}.ask(p.block_bytes / 64);
  scores(w, head_dim, part);
  // tile products run beside the vectors of another step: scores of the next partition, values of the last one
  for (int i = p0; i < p1; ++i) {
    const bool more = i + 1 < p1, all = all_from <= part.key && all_to >= part.key + kPartition - 1;
    if (more) next = part_at(i + 1);
    interleave(w, head_dim, part);
    if (i > p0) fold(w, t.count, head_dim, state, ld);
    const bool capped = p.softcap > 0.0f;
    if (!all || capped) mask(w, p, t, part, all);
    Ahead ahead{more ? &next : nullptr, p.block_bytes};
    soften(w, capped ? 1.0f : p.scale, t.count, ahead);
    if (more) scores(w, head_dim, next);
    weigh(w, head_dim);
    part = next;
  }
  fold(w, t.count, head_dim, state, ld);
  _tile_release();
}

void attend(const AttentionArgs& p, const QueryTile& t, const int32_t* table, int p0, int p1, float* state) {
  if (has_tiles(p)) return attend_tiles(p, t, table, p0, p1, state);
  other().attend(p, t, table, p0, p1, state);
}

void finish(const AttentionArgs& p, const float* state, int row, int head) {
  if (!has_tiles(p)) return other().finish(p, state, row, head);
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const V by = S::set1(1.0f / state[1]);
  auto* out = static_cast<uint16_t*>(p.out) + size_t(row) * p.ld_out + size_t(head) * p.head_dim;
  for (int i = 0; i < p.head_dim; i += 32) {
    const V a = S::mul(S::load(state + kStateHead + i), by), b = S::mul(S::load(state + kStateHead + i + 16), by);
    _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_permutex2var_ps(a, second, b),
                                                              _mm512_permutex2var_ps(a, first, b)));
  }
}

}  // namespace

namespace paceline {
void amx_attend(const AttentionArgs& p, const QueryTile& t, const int32_t* table, int p0, int p1, float* state) {
  attend(p, t, table, p0, p1, state);
}
void amx_finish(const AttentionArgs& p, const float* state, int row, int head) { finish(p, state, row, head); }
}  // namespace paceline
#endif
