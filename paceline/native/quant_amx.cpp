// The quantised kernels with the tile unit (AMX), for products of many rows. The same bits as quant_portable.cpp: sums
// inside a group are exact integers whoever adds them up, and what follows is done in the same order by the same
// operations. So which rows go here is a matter of speed alone, and few rows stay with quant_vnni.cpp.
#if defined(__x86_64__) && defined(PACELINE_AMX)
#include <immintrin.h>

#include "amx.h"
#include "amx_tiles.h"

namespace {

using paceline::kGroup;
using paceline::kMaxQuantRows;
using paceline::kSpreadGroup;
using paceline::Quant;
using paceline::QuantGroup;
using paceline::QuantTile;

inline __m512 halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

// A row of sums before any product.
alignas(64) const int32_t kStart[16] = {
    paceline::kMagicBits, paceline::kMagicBits, paceline::kMagicBits, paceline::kMagicBits,
    paceline::kMagicBits, paceline::kMagicBits, paceline::kMagicBits, paceline::kMagicBits,
    paceline::kMagicBits, paceline::kMagicBits, paceline::kMagicBits, paceline::kMagicBits,
    paceline::kMagicBits, paceline::kMagicBits, paceline::kMagicBits, paceline::kMagicBits};

// Half a panel's group as the second operand of a tile product: [8 lines] of signed bytes.
template <Quant F>
inline void spread(const uint8_t* w, int8_t* out) {
  if constexpr (F == Quant::kInt8 || F == Quant::kInt8Channel) {
    const __m512i offset = _mm512_set1_epi8(-128);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j)
      _mm512_store_si512(out + j * 64, _mm512_xor_si512(_mm512_loadu_si512(w + j * 64), offset));
  } else {
    const __m512i mask = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i x = _mm512_loadu_si512(w + j * 64);
      __m512i low = _mm512_and_si512(x, mask), high = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
      if (F == Quant::kInt4) low = _mm512_sub_epi8(low, eight), high = _mm512_sub_epi8(high, eight);
      _mm512_store_si512(out + j * 64, low);
      _mm512_store_si512(out + (4 + j) * 64, high);
    }
  }
}

template <Quant F, int MR>
inline void scale_group(const QuantGroup* a, const int32_t* sums, const uint8_t* scales, __m512* out) {
  const __m512 ws = F == Quant::kInt8Channel ? _mm512_set1_ps(1) : halves(scales);
  const __m512 offset = _mm512_mul_ps(ws, _mm512_set1_ps(paceline::kMagic));
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    const __m512 scaled = _mm512_fmsub_ps(_mm512_castsi512_ps(_mm512_load_si512(sums + r * 16)), ws, offset);
    out[r] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(a[r].scale), out[r]);
  }
  if constexpr (F == Quant::kInt4Min) {
    const __m512 m = halves(scales + 64);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) out[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(a[r].scaled_sum), out[r]);
  }
}

// MR rows times half a panel. Sums go through memory: tiles are three groups ahead of what scales them, and are stored
// two groups after they were begun, so that neither waits for the other. The first tile of rows spreads the weights
// out, five groups ahead of the products; others find them. A group's rows are the 32 values at the start of each
// record.
template <Quant F, int MR>
inline void half_t(const QuantTile& t, int half) {
  constexpr size_t kBytes = paceline::quant_group_bytes(F);
  alignas(64) int32_t sums[4][kMaxQuantRows * 16];
  __m512 out[MR];
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) out[r] = _mm512_setzero_ps();
  const uint8_t* panel = t.w + paceline::quant_header_bytes(F);
  const uint8_t* w = panel + size_t(half) * paceline::quant_half_bytes(F);
  const uint8_t* scales = panel + 2 * paceline::quant_half_bytes(F) + size_t(half) * 32;
  const uint8_t* next = t.next + size_t(half) * size_t(t.groups) * size_t(t.lines) * 64;
  int8_t* ready = t.spread + size_t(half) * size_t(t.groups) * kSpreadGroup;
  const int fresh = t.fresh ? t.groups : 0;
  const QuantGroup* a = t.a;
  // numbers of tiles are part of the instructions
#define SPREAD(group) \
  if ((group) < fresh) spread<F>(w + size_t(group) * kBytes, ready + size_t(group) * kSpreadGroup)
#define BEGIN(C, A, B, group)                                                   \
  do {                                                                          \
    if ((group) >= t.groups) break;                                             \
    _tile_loadd(C, kStart, 0);                                                  \
    _tile_loadd(A, t.a + size_t(group) * size_t(t.stride), sizeof(QuantGroup)); \
    written(ready);                                                             \
    _tile_loadd(B, ready + size_t(group) * kSpreadGroup, 64);                   \
    _tile_dpbssd(C, A, B);                                                      \
  } while (0)
#define STEP(now, C, A, B, done)                                                                \
  do {                                                                                          \
    for (int i = 0; i < t.lines; ++i, next += 64) _mm_prefetch((const char*)next, _MM_HINT_T1); \
    if (g + now + 1 < t.groups) _tile_stored(done, sums[done], 64);                             \
    BEGIN(C, A, B, g + now + 3);                                                                \
    SPREAD(g + now + 5);                                                                        \
    scale_group<F, MR>(a, sums[now], scales, out);                                              \
    a += t.stride;                                                                              \
    scales += kBytes;                                                                           \
    if (g + now + 1 >= t.groups) goto end;                                                      \
  } while (0)
  for (int i = 0; i < 5; ++i) SPREAD(i);
  BEGIN(0, 4, 6, 0);
  BEGIN(1, 5, 7, 1);
  BEGIN(2, 4, 6, 2);
  _tile_stored(0, sums[0], 64);
  for (int g = 0;; g += 4) {
    STEP(0, 3, 5, 7, 1);
    STEP(1, 0, 4, 6, 2);
    STEP(2, 1, 5, 7, 3);
    STEP(3, 2, 4, 6, 0);
  }
#undef STEP
#undef BEGIN
#undef SPREAD
end:
  const __m512 column = _mm512_loadu_ps(t.w + half * 64);  // scales of kInt8Channel
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r)
    _mm512_storeu_ps(t.out + size_t(r) * t.ld + half * 16,
                     F == Quant::kInt8Channel ? _mm512_mul_ps(out[r], column) : out[r]);
}

template <Quant F, int MR>
void panel_t(const QuantTile& t) {
  half_t<F, MR>(t, 0);
  half_t<F, MR>(t, 1);
}

template <Quant F>
void rows_t(const QuantTile& t) {
  using Panel = void (*)(const QuantTile&);
  static constexpr Panel table[] = {panel_t<F, 1>,  panel_t<F, 2>,  panel_t<F, 3>,  panel_t<F, 4>,
                                    panel_t<F, 5>,  panel_t<F, 6>,  panel_t<F, 7>,  panel_t<F, 8>,
                                    panel_t<F, 9>,  panel_t<F, 10>, panel_t<F, 11>, panel_t<F, 12>,
                                    panel_t<F, 13>, panel_t<F, 14>, panel_t<F, 15>, panel_t<F, 16>};
  static_assert(sizeof(table) / sizeof(table[0]) == kMaxQuantRows, "one for every number of rows");
  table[t.rows - 1](t);
}

void tile(Quant format, const QuantTile& t) {
  switch (format) {
    case Quant::kInt8:
      return rows_t<Quant::kInt8>(t);
    case Quant::kInt8Channel:
      return rows_t<Quant::kInt8Channel>(t);
    case Quant::kInt4:
      return rows_t<Quant::kInt4>(t);
    case Quant::kInt4Min:
      return rows_t<Quant::kInt4Min>(t);
    case Quant::kNone:
      break;
  }
}

// The last tile of a product may have fewer rows: what its tiles hold besides is passed over.
void begin(int rows) {
  TileConfig c;  // 0 to 3: sums, 4 and 5: rows, 6 and 7: weights
  for (int i = 0; i < 8; ++i) c.set(i, i < 6 ? rows : kGroup / 4, i == 4 || i == 5 ? kGroup : 64);
  c.load();
}

}  // namespace

namespace paceline {
void amx_quant_begin(int rows) { begin(rows); }
void amx_quant_end() { _tile_release(); }
void amx_quant_tile(Quant f, const QuantTile& t) { tile(f, t); }
}  // namespace paceline
#endif
