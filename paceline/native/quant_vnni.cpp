// The quantised kernels with AVX-512 and its byte dot product. The same bits as quant_portable.cpp.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "quant.h"

namespace {

using paceline::kGroup;
using paceline::Quant;
using paceline::QuantGroup;
using paceline::QuantTile;

constexpr int kWholeRows = 6;  // up to here a tile walks over both halves of a panel at once

// Adds the products of 16 x 4 unsigned bytes with four values of a row. In assembler because GCC makes two instructions
// of it, the broadcast apart, and then a tile of 8 rows or more no longer fits what the processor looks ahead.
inline void dot(__m512i& sum, __m512i weights, const int8_t* q) {
  struct Four {
    int8_t value[4];
  };
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const Four*>(q)));
}

inline __m512 halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

// A tile that reads weights first asks for its own lines so many groups ahead, too: from the second-level cache, into
// which they were asked for a pair of panels earlier, or from wherever they are by then.
constexpr size_t kOwnGroups = 4;

// Step `step` of `kSteps` in a group asks for its part of at most kLines lines: unrolled, since a loop of one or two
// rounds between the products costs more than what it asks for.
template <bool kNear, int kLines, int kSteps>
inline void ask(const QuantTile& t, const uint8_t*& next, int step) {
#pragma GCC unroll 4
  for (int line = step; line < kLines; line += kSteps) {
    if (line >= t.lines) break;
    if (kNear && t.near)
      _mm_prefetch((const char*)next, _MM_HINT_T0);
    else
      _mm_prefetch((const char*)next, _MM_HINT_T1);
    next += 64;
  }
}

// MR rows times NV halves of a panel, from half `first` on. Loops over registers are unrolled by name: GCC keeps an
// array that it indexes in memory.
template <Quant F, int MR, int NV>
inline void tile_t(const QuantTile& t, int first) {
  constexpr bool kInt8 = paceline::is_int8(F);
  constexpr size_t kHalf = paceline::quant_half_bytes(F), kBytes = paceline::quant_group_bytes(F);
  __m512 out[MR][NV];
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) out[r][v] = _mm512_setzero_ps();
  constexpr int kSteps = kInt8 ? 8 : 4;
  constexpr bool kNear = MR <= 2;                                 // wider products never ask for that
  constexpr int kLines = (int(kBytes / 64) + 2 - NV) / (3 - NV);  // of a product of one tile; with several, fewer each
  const QuantGroup* a = t.a;
  const uint8_t* w = t.w + paceline::quant_header_bytes(F);
  const uint8_t* scales = w + 2 * kHalf + first * 32;
  w += size_t(first) * kHalf;
  const size_t own = t.fresh ? kOwnGroups * kBytes : 0;  // later tiles: a line at hand
  const auto line = [&](const uint8_t* at) {
    if (MR > 2) _mm_prefetch((const char*)at + own, _MM_HINT_T0);  // fewer rows keep up with memory without it
    return _mm512_loadu_si512(at);
  };
  const uint8_t* next = t.next + (NV == 1 ? size_t(first) * size_t(t.groups) * size_t(t.lines) * 64 : 0);
  for (int g = 0; g < t.groups; ++g, a += t.stride, w += kBytes, scales += kBytes) {
    __m512i sum[MR][NV];
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v)
        sum[r][v] = _mm512_set1_epi32(kInt8               ? a[r].start_int8
                                      : F == Quant::kInt4 ? a[r].start_int4
                                                          : paceline::kMagicBits);
    if constexpr (kInt8) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        ask<kNear, kLines, kSteps>(t, next, j);
        __m512i x[NV];
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) x[v] = line(w + v * kHalf + j * 64);
#pragma GCC unroll 12
        for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
          for (int v = 0; v < NV; ++v) dot(sum[r][v], x[v], a[r].q + j * 4);
      }
    } else {
      const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        ask<kNear, kLines, kSteps>(t, next, j);
        __m512i x[NV];
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) x[v] = line(w + v * kHalf + j * 64);
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) {
          const __m512i low = _mm512_and_si512(x[v], mask);
          const __m512i high = _mm512_and_si512(_mm512_srli_epi16(x[v], 4), mask);
#pragma GCC unroll 12
          for (int r = 0; r < MR; ++r) dot(sum[r][v], low, a[r].q + j * 4);
#pragma GCC unroll 12
          for (int r = 0; r < MR; ++r) dot(sum[r][v], high, a[r].q + 16 + j * 4);
        }
      }
    }
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      const __m512 ws = F == Quant::kInt8Channel ? _mm512_set1_ps(1) : halves(scales + v * 32);
      const __m512 offset = _mm512_mul_ps(ws, _mm512_set1_ps(paceline::kMagic));
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r) {
        const __m512 scaled = _mm512_fmsub_ps(_mm512_castsi512_ps(sum[r][v]), ws, offset);
        out[r][v] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(a[r].scale), out[r][v]);
      }
      if constexpr (F == Quant::kInt4Min) {
        const __m512 m = halves(scales + 64 + v * 32);
#pragma GCC unroll 12
        for (int r = 0; r < MR; ++r) out[r][v] = _mm512_fmadd_ps(m, _mm512_set1_ps(a[r].scaled_sum), out[r][v]);
      }
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < NV; ++v) {
    const int column = (first + v) * 16;
    const __m512 scale = _mm512_loadu_ps(t.w + column * 4);  // of kInt8Channel
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r)
      _mm512_storeu_ps(t.out + size_t(r) * t.ld + column,
                       F == Quant::kInt8Channel ? _mm512_mul_ps(out[r][v], scale) : out[r][v]);
  }
}

template <Quant F, int MR>
void panel_t(const QuantTile& t) {
  if constexpr (MR <= kWholeRows) {
    tile_t<F, MR, 2>(t, 0);
  } else {
    tile_t<F, MR, 1>(t, 0);
    tile_t<F, MR, 1>(t, 1);
  }
}

template <Quant F>
void rows_t(const QuantTile& t) {
  using Panel = void (*)(const QuantTile&);
  static constexpr Panel table[] = {panel_t<F, 1>, panel_t<F, 2>,  panel_t<F, 3>,  panel_t<F, 4>,
                                    panel_t<F, 5>, panel_t<F, 6>,  panel_t<F, 7>,  panel_t<F, 8>,
                                    panel_t<F, 9>, panel_t<F, 10>, panel_t<F, 11>, panel_t<F, 12>};
  static_assert(sizeof(table) / sizeof(table[0]) == paceline::kQuantRows, "one for every number of rows");
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

// Sixteen values from x + i as bits of fp32; those from k on are 0.
template <bool kBf16, bool kWhole>
inline __m512i values(const void* x, int i, int k) {
  const int left = kWhole ? 16 : k - i;
  const __mmask16 there = left >= 16 ? 0xffff : left <= 0 ? 0 : __mmask16((1u << left) - 1);
  if (kBf16)
    return _mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, static_cast<const uint16_t*>(x) + i)), 16);
  return _mm512_maskz_loadu_epi32(there, static_cast<const float*>(x) + i);
}

// Four registers -> four results of `fold` over their lanes.
template <class Fold>
inline __m128i reduce(const __m512i* x, Fold fold) {
  const __m512i a = fold(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
  const __m512i b = fold(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
  __m512i c = fold(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  c = fold(c, _mm512_shuffle_i64x2(c, c, 0x4e));
  c = fold(c, _mm512_shuffle_i64x2(c, c, 0xb1));
  return _mm512_castsi512_si128(c);
}

// Up to four groups at once, for the sake of the sums over lanes.
template <bool kBf16, bool kWhole>
inline void quantise_four(const void* x, int from, int k, int groups, QuantGroup* out, size_t stride) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i part[4][2], wide[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    part[g][0] = values<kBf16, kWhole>(x, from + g * kGroup, k);
    part[g][1] = values<kBf16, kWhole>(x, from + g * kGroup + 16, k);
    wide[g] = _mm512_max_epu32(_mm512_and_si512(part[g][0], magnitude), _mm512_and_si512(part[g][1], magnitude));
  }
  const __m128 most = _mm_castsi128_ps(reduce(wide, [](__m512i a, __m512i b) { return _mm512_max_epu32(a, b); }));
  const __mmask8 normal = _mm_cmp_ps_mask(most, _mm_set1_ps(0x1p-100f), _CMP_NLT_UQ);  // NaN too
  const __m512 inverse = _mm512_castps128_ps512(_mm_maskz_div_ps(normal, _mm_set1_ps(127.0f), most));
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const __m512 inv = _mm512_permutexvar_ps(_mm512_set1_epi32(g), inverse);
    const __m512i q0 = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(part[g][0]), inv));
    const __m512i q1 = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(part[g][1]), inv));
    wide[g] = _mm512_add_epi32(q0, q1);
    if (g < groups) {
      QuantGroup& to = out[size_t(g) * stride];
      _mm_storeu_si128((__m128i*)to.q, _mm512_cvtepi32_epi8(q0));
      _mm_storeu_si128((__m128i*)(to.q + 16), _mm512_cvtepi32_epi8(q1));
    }
  }
  const __m128i sums = reduce(wide, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
  const __m128i minus = _mm_sub_epi32(_mm_setzero_si128(), sums);
  __m128 scale = _mm_maskz_div_ps(normal, most, _mm_set1_ps(127.0f));
  const __m128i magic = _mm_set1_epi32(paceline::kMagicBits);
  __m128 start8 = _mm_castsi128_ps(_mm_add_epi32(magic, _mm_slli_epi32(minus, 7)));
  __m128 start4 = _mm_castsi128_ps(_mm_add_epi32(magic, _mm_slli_epi32(minus, 3)));
  __m128 scaled = _mm_mul_ps(scale, _mm_cvtepi32_ps(sums));
  _MM_TRANSPOSE4_PS(scale, start8, start4, scaled);  // the fields behind q, group by group
  const __m128 fields[4] = {scale, start8, start4, scaled};
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g)
    if (g < groups) _mm_storeu_ps(&out[size_t(g) * stride].scale, fields[g]);
}

template <bool kBf16>
void quantise_t(const void* x, int k, QuantGroup* out, size_t stride) {
  int from = 0;
  for (; from + 4 * kGroup <= k; from += 4 * kGroup, out += 4 * stride)
    quantise_four<kBf16, true>(x, from, k, 4, out, stride);
  if (from < k) quantise_four<kBf16, false>(x, from, k, (k - from + kGroup - 1) / kGroup, out, stride);
}

void quantise(const void* x, bool bf16, int k, QuantGroup* out, size_t stride) {
  bf16 ? quantise_t<true>(x, k, out, stride) : quantise_t<false>(x, k, out, stride);
}

double peak_loop(long iterations, bool) {
  __m512i w = _mm512_set1_epi8(1);
  // written out: GCC would keep so many accumulators in memory
#define DOT(n) "vpdpbusd %0, %0, %%zmm" #n "\n\t"
  for (long i = 0; i < iterations; ++i)
    asm volatile(DOT(0) DOT(1) DOT(2) DOT(3) DOT(4) DOT(5) DOT(6) DOT(7) DOT(8) DOT(9) DOT(10) DOT(11) DOT(12) DOT(13)
                     DOT(14) DOT(15) DOT(16) DOT(17) DOT(18) DOT(19) DOT(20) DOT(21) DOT(22) DOT(23)
                 : "+v"(w)
                 :
                 : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                   "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22",
                   "xmm23");
#undef DOT
  return double(iterations) * 24 * 64 * 2;
}

}  // namespace

namespace paceline {
extern const QuantKernels kVnniQuant;
const QuantKernels kVnniQuant = {"avx512_vnni", tile, quantise, peak_loop, kWholeRows};
}  // namespace paceline
#endif
