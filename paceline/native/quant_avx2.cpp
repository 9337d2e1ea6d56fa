// The quantised kernels with AVX2: 16-bit sums of byte products. The same bits as quant_portable.cpp.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "quant.h"

namespace {

using paceline::kGroup;
using paceline::Quant;
using paceline::QuantGroup;
using paceline::QuantTile;

constexpr int kRowsOfPairs = 5;  // up to here the sums of 16 columns fit the registers

struct Four {
  int8_t value[4];
};
struct Pair {
  int16_t value[2];
};

// Sums of products in assembler: GCC would add them up in another order, as a tree whose leaves do not fit the
// registers. Two registers of columns share what is spread of a row.
//
// 8 x 4 unsigned bytes times four values of a row, in pairs of 16 bits. kFirst: sums start with them.
template <bool kFirst>
inline void dot(__m256i (&sum)[1], const __m256i (&w)[1], const int8_t* q) {
  const Four& four = *reinterpret_cast<const Four*>(q);
  __m256i t;
  if constexpr (kFirst)
    asm("vpbroadcastd %1, %0\n\tvpmaddubsw %0, %2, %0" : "=&x"(sum[0]) : "m"(four), "x"(w[0]));
  else
    asm("vpbroadcastd %2, %0\n\tvpmaddubsw %0, %3, %0\n\tvpaddw %0, %1, %1"
        : "=&x"(t), "+x"(sum[0])
        : "m"(four), "x"(w[0]));
}
template <bool kFirst>
inline void dot(__m256i (&sum)[2], const __m256i (&w)[2], const int8_t* q) {
  const Four& four = *reinterpret_cast<const Four*>(q);
  __m256i t, u;
  if constexpr (kFirst)
    asm("vpbroadcastd %2, %1\n\tvpmaddubsw %1, %3, %0\n\tvpmaddubsw %1, %4, %1"
        : "=&x"(sum[0]), "=&x"(sum[1])
        : "m"(four), "x"(w[0]), "x"(w[1]));
  else
    asm("vpbroadcastd %4, %0\n\tvpmaddubsw %0, %5, %1\n\tvpmaddubsw %0, %6, %0\n\tvpaddw %1, %2, %2\n\tvpaddw %0, %3, "
        "%3"
        : "=&x"(t), "=&x"(u), "+x"(sum[0]), "+x"(sum[1])
        : "m"(four), "x"(w[0]), "x"(w[1]));
}

// 8 x 2 values of 16 bits times two of a row.
inline void dot(__m256i (&sum)[1], const __m256i (&w)[1], const int16_t* q) {
  __m256i t;
  asm("vpbroadcastd %2, %0\n\tvpmaddwd %0, %3, %0\n\tvpaddd %0, %1, %1"
      : "=&x"(t), "+x"(sum[0])
      : "m"(*reinterpret_cast<const Pair*>(q)), "x"(w[0]));
}
inline void dot(__m256i (&sum)[2], const __m256i (&w)[2], const int16_t* q) {
  __m256i t, u;
  asm("vpbroadcastd %4, %0\n\tvpmaddwd %0, %5, %1\n\tvpmaddwd %0, %6, %0\n\tvpaddd %1, %2, %2\n\tvpaddd %0, %3, %3"
      : "=&x"(t), "=&x"(u), "+x"(sum[0]), "+x"(sum[1])
      : "m"(*reinterpret_cast<const Pair*>(q)), "x"(w[0]), "x"(w[1]));
}

// What lies `kStep` bytes apart for each row, reached from few registers with displacements of one byte: with longer
// ones, what the processor fetches and decodes falls behind what it multiplies.
template <int MR, int kStep>
struct Rows {
  static constexpr int kReach = 256 / kStep;
  const int8_t* base[(MR + kReach - 1) / kReach];
  explicit Rows(const void* first) {
#pragma GCC unroll 12
    for (int i = 0; i * kReach < MR; ++i) {
      base[i] = static_cast<const int8_t*>(first) + i * kReach * kStep + 128;
      asm("" : "+r"(base[i]));  // or GCC would make one register of them again
    }
  }
  const int8_t* at(int r) const { return base[r / kReach] + r % kReach * kStep - 128; }
};

inline __m256 halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

// Exact sums of one group: MR rows, NO times eight columns of int4, started with the rows' constants.
template <Quant F, int MR, int NO>
inline void sums_int4(const QuantGroup* a, const uint8_t* w, __m256i (*sum)[NO]) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const Rows<MR, sizeof(QuantGroup)> rows(a);
  // 15 * 127 * 2 * 8 = 30480: a whole group fits 16 bits
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    __m256i low[NO], high[NO];
#pragma GCC unroll 2
    for (int o = 0; o < NO; ++o) {
      const __m256i x = _mm256_loadu_si256((const __m256i*)(w + j * 64 + o * 32));
      low[o] = _mm256_and_si256(x, mask);
      high[o] = _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
    }
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      if (j == 0)
        dot<true>(sum[r], low, rows.at(r));
      else
        dot<false>(sum[r], low, rows.at(r) + j * 4);
    }
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) dot<false>(sum[r], high, rows.at(r) + 16 + j * 4);
  }
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r) {
    const int32_t start = F == Quant::kInt4 ? a[r].start_int4 : paceline::kMagicBits;
#pragma GCC unroll 2
    for (int o = 0; o < NO; ++o)
      sum[r][o] = _mm256_add_epi32(_mm256_madd_epi16(sum[r][o], ones), _mm256_set1_epi32(start));
  }
}

// The same of int8. wide: [row][2][16], the even and the odd values of each row. 255 * 127 * 2 does not fit 16 bits.
template <int MR, int NO>
inline void sums_int8(const QuantGroup* a, const int16_t* wide, const uint8_t* w, __m256i (*sum)[NO]) {
  const __m256i mask = _mm256_set1_epi16(255);
  const Rows<MR, 64> rows(wide);
  const auto pair = [&](int r, int i) { return reinterpret_cast<const int16_t*>(rows.at(r)) + i; };
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int o = 0; o < NO; ++o) sum[r][o] = _mm256_set1_epi32(a[r].start_int8);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    __m256i even[NO], odd[NO];
#pragma GCC unroll 2
    for (int o = 0; o < NO; ++o) {
      const __m256i x = _mm256_loadu_si256((const __m256i*)(w + j * 64 + o * 32));
      even[o] = _mm256_and_si256(x, mask);
      odd[o] = _mm256_srli_epi16(x, 8);
    }
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) dot(sum[r], even, pair(r, 2 * j));
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) dot(sum[r], odd, pair(r, 16 + 2 * j));
  }
}

// One group of MR rows and NO times eight columns: out [MR][32].
template <Quant F, int MR, int NO>
inline void columns(const QuantGroup* a, const int16_t* wide, const uint8_t* w, const uint8_t* scales, float* out) {
  __m256i sum[MR][NO];
  if constexpr (paceline::is_int8(F))
    sums_int8<MR, NO>(a, wide, w, sum);
  else
    sums_int4<F, MR, NO>(a, w, sum);
#pragma GCC unroll 2
  for (int o = 0; o < NO; ++o) {
    const __m256 ws = F == Quant::kInt8Channel ? _mm256_set1_ps(1) : halves(scales + o * 16);
    const __m256 offset = _mm256_mul_ps(ws, _mm256_set1_ps(paceline::kMagic));
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      float* to = out + r * 32 + o * 8;
      const __m256 scaled = _mm256_fmsub_ps(_mm256_castsi256_ps(sum[r][o]), ws, offset);
      __m256 y = _mm256_fmadd_ps(scaled, _mm256_set1_ps(a[r].scale), _mm256_load_ps(to));
      if constexpr (F == Quant::kInt4Min)
        y = _mm256_fmadd_ps(halves(scales + 64 + o * 16), _mm256_set1_ps(a[r].scaled_sum), y);
      _mm256_store_ps(to, y);
    }
  }
}

// MR rows times a panel. Sums of groups take the registers; results wait in the first-level cache.
template <Quant F, int MR>
void tile_t(const QuantTile& t) {
  constexpr size_t kHalf = paceline::quant_half_bytes(F), kBytes = paceline::quant_group_bytes(F);
  constexpr int NO = MR <= kRowsOfPairs ? 2 : 1;
  alignas(64) float out[MR * 32] = {0};
  alignas(64) int16_t wide[paceline::is_int8(F) ? MR * kGroup : 1];
  const QuantGroup* a = t.a;
  const uint8_t *w = t.w + paceline::quant_header_bytes(F), *next = t.next;
  for (int g = 0; g < t.groups; ++g, a += t.stride, w += kBytes) {
    if constexpr (paceline::is_int8(F))
      for (int r = 0; r < MR; ++r) {
        const __m256i x = _mm256_loadu_si256((const __m256i*)a[r].q);
        _mm256_store_si256((__m256i*)(wide + r * kGroup), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
        _mm256_store_si256((__m256i*)(wide + r * kGroup + 16), _mm256_srai_epi16(x, 8));
      }
    for (int part = 0; part < 4; part += NO) {
      for (int i = part / NO; i < t.lines; i += 4 / NO, next += 64) {
        if (MR <= 2 && t.near)  // wider products never ask for that
          _mm_prefetch((const char*)next, _MM_HINT_T0);
        else
          _mm_prefetch((const char*)next, _MM_HINT_T1);
      }
      columns<F, MR, NO>(a, wide, w + size_t(part / 2) * kHalf + part % 2 * 32, w + 2 * kHalf + part * 16,
                         out + part * 8);
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int c = 0; c < 32; c += 8) {
      const __m256 y = _mm256_load_ps(out + r * 32 + c);
      const __m256 scale = _mm256_loadu_ps(reinterpret_cast<const float*>(t.w) + c);  // of kInt8Channel
      _mm256_storeu_ps(t.out + size_t(r) * t.ld + c, F == Quant::kInt8Channel ? _mm256_mul_ps(y, scale) : y);
    }
}

template <Quant F>
void rows_t(const QuantTile& t) {
  using Tile = void (*)(const QuantTile&);
  static constexpr Tile table[] = {tile_t<F, 1>, tile_t<F, 2>,  tile_t<F, 3>,  tile_t<F, 4>,
                                   tile_t<F, 5>, tile_t<F, 6>,  tile_t<F, 7>,  tile_t<F, 8>,
                                   tile_t<F, 9>, tile_t<F, 10>, tile_t<F, 11>, tile_t<F, 12>};
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

// Eight values from x + i as bits of fp32, those from k on 0.
template <bool kBf16>
inline __m256i values(const void* x, int i, int k) {
  uint32_t part[8] = {0};
  if (i + 8 <= k) {
    if (kBf16)
      return _mm256_slli_epi32(
          _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(static_cast<const uint16_t*>(x) + i))), 16);
    return _mm256_loadu_si256((const __m256i*)(static_cast<const float*>(x) + i));
  }
  for (int j = 0; j < 8 && i + j < k; ++j) {
    if (kBf16)
      part[j] = uint32_t(static_cast<const uint16_t*>(x)[i + j]) << 16;
    else
      memcpy(&part[j], static_cast<const float*>(x) + i + j, 4);
  }
  return _mm256_loadu_si256((const __m256i*)part);
}

template <bool kBf16>
void quantise_t(const void* x, int k, QuantGroup* out, size_t stride) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int from = 0; from < k; from += kGroup, out += stride) {
    __m256i part[4], most8 = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
      part[i] = values<kBf16>(x, from + i * 8, k);
      most8 = _mm256_max_epu32(most8, _mm256_and_si256(part[i], magnitude));
    }
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(most8), _mm256_extracti128_si256(most8, 1));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
    const int most = _mm_cvtsi128_si32(m);
    float amax;
    memcpy(&amax, &most, 4);
    const bool tiny = amax < 0x1p-100f;
    const __m256 inv = _mm256_set1_ps(tiny ? 0.0f : 127.0f / amax);
    __m256i q[4];
    for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(part[i]), inv));
    // packing interleaves the halves of the registers: put the sets of four back in order
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)out->q, _mm256_permutevar8x32_epi32(packed, order));
    const __m256i s8 = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(s8), _mm256_extracti128_si256(s8, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    const int32_t sum = _mm_cvtsi128_si32(s);
    out->scale = tiny ? 0.0f : amax / 127.0f;
    out->start_int8 = int32_t(uint32_t(paceline::kMagicBits) - 128u * uint32_t(sum));
    out->start_int4 = int32_t(uint32_t(paceline::kMagicBits) - 8u * uint32_t(sum));
    out->scaled_sum = out->scale * float(sum);
  }
}

void quantise(const void* x, bool bf16, int k, QuantGroup* out, size_t stride) {
  bf16 ? quantise_t<true>(x, k, out, stride) : quantise_t<false>(x, k, out, stride);
}

// What stands in for a dot product: of int4 products added up in 16 bits, of int8 in 32. Written out, as in VNNI's.
double peak_loop(long iterations, bool int4) {
#define ADDED(multiply, add, n) multiply " %0, %0, %%ymm15\n\t" add " %%ymm15, %%ymm" #n ", %%ymm" #n "\n\t"
#define FOUR(m, a, i, j, k, l) ADDED(m, a, i) ADDED(m, a, j) ADDED(m, a, k) ADDED(m, a, l)
#define TWELVE(m, a) FOUR(m, a, 0, 1, 2, 3) FOUR(m, a, 4, 5, 6, 7) FOUR(m, a, 8, 9, 10, 11)
#define CLOBBERED \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm15"
  __m256i w = _mm256_set1_epi8(1);
  for (long i = 0; i < iterations; ++i) {
    if (int4)
      asm volatile(TWELVE("vpmaddubsw", "vpaddw") : "+x"(w) : : CLOBBERED);
    else
      asm volatile(TWELVE("vpmaddwd", "vpaddd") : "+x"(w) : : CLOBBERED);
  }
#undef CLOBBERED
#undef TWELVE
#undef FOUR
#undef ADDED
  return double(iterations) * 12 * (int4 ? 32 : 16) * 2;
}

}  // namespace

namespace paceline {
extern const QuantKernels kAvx2Quant;
const QuantKernels kAvx2Quant = {"avx2", tile, quantise, peak_loop, paceline::kQuantRows};
}  // namespace paceline
#endif
