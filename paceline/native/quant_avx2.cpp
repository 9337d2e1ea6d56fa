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

constexpr int kRows = 4;  // rows of a tile: sums and results in registers

inline __m256i four(const int8_t* q) {
  int32_t x;
  memcpy(&x, q, 4);
  return _mm256_set1_epi32(x);
}

inline __m256 halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

// MR rows times eight columns: quarter `part` of a panel.
template <Quant F, int MR>
inline void tile_t(const QuantTile& t, int row, int part) {
  constexpr bool kInt8 = F == Quant::kInt8 || F == Quant::kInt8Channel;
  constexpr size_t kHalf = paceline::quant_half_bytes(F), kBytes = paceline::quant_group_bytes(F);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256 out[MR];
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r) out[r] = _mm256_setzero_ps();
  const QuantGroup* a = t.a + row;
  const uint8_t* group = t.w + paceline::quant_header_bytes(F);
  const bool ahead = row == 0 && part < 2;  // a panel is asked for in two halves
  const uint8_t* next = t.next + size_t(part) * size_t(t.groups) * size_t(t.lines) * 64;
  for (int g = 0; g < t.groups; ++g, a += t.stride, group += kBytes) {
    for (int i = 0; ahead && i < t.lines; ++i, next += 64) _mm_prefetch((const char*)next, _MM_HINT_T0);
    const uint8_t* w = group + size_t(part / 2) * kHalf + part % 2 * 32;
    const uint8_t* scales = group + 2 * kHalf + part * 16;
    __m256i sum[MR];
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) sum[r] = kInt8 ? _mm256_set1_epi32(paceline::kMagicBits) : _mm256_setzero_si256();
    if constexpr (kInt8) {
      // |w| <= 128 times |a| <= 127: two of them fit 16 bits
#pragma GCC unroll 2
      for (int j = 0; j < 8; ++j) {
        const __m256i x = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(w + j * 64)), _mm256_set1_epi8(-128));
        const __m256i size = _mm256_abs_epi8(x);
#pragma GCC unroll 4
        for (int r = 0; r < MR; ++r) {
          const __m256i p = _mm256_maddubs_epi16(size, _mm256_sign_epi8(four(a[r].q + j * 4), x));
          sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(p, ones));
        }
      }
    } else {
      // 15 * 127 * 2 * 8 = 30480: a whole group fits 16 bits
      const __m256i mask = _mm256_set1_epi8(15);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m256i x = _mm256_loadu_si256((const __m256i*)(w + j * 64));
        const __m256i low = _mm256_and_si256(x, mask), high = _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
#pragma GCC unroll 4
        for (int r = 0; r < MR; ++r) {
          sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(low, four(a[r].q + j * 4)));
          sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(high, four(a[r].q + 16 + j * 4)));
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) {
        const __m256i start = _mm256_set1_epi32(F == Quant::kInt4 ? a[r].start_int4 : paceline::kMagicBits);
        sum[r] = _mm256_add_epi32(_mm256_madd_epi16(sum[r], ones), start);
      }
    }
    const __m256 ws = F == Quant::kInt8Channel ? _mm256_set1_ps(1) : halves(scales);
    const __m256 offset = _mm256_mul_ps(ws, _mm256_set1_ps(paceline::kMagic));
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
      const __m256 scaled = _mm256_fmsub_ps(_mm256_castsi256_ps(sum[r]), ws, offset);
      out[r] = _mm256_fmadd_ps(scaled, _mm256_set1_ps(a[r].scale), out[r]);
    }
    if constexpr (F == Quant::kInt4Min) {
      const __m256 m = halves(scales + 64);
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) out[r] = _mm256_fmadd_ps(m, _mm256_set1_ps(a[r].scaled_sum), out[r]);
    }
  }
  const __m256 scale = _mm256_loadu_ps(reinterpret_cast<const float*>(t.w) + part * 8);  // of kInt8Channel
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r)
    _mm256_storeu_ps(t.out + size_t(row + r) * t.ld + part * 8,
                     F == Quant::kInt8Channel ? _mm256_mul_ps(out[r], scale) : out[r]);
}

template <Quant F>
void rows_t(const QuantTile& t) {
  for (int row = 0; row < t.rows; row += kRows)
    for (int part = 0; part < 4; ++part) switch (t.rows - row) {
        case 1:
          tile_t<F, 1>(t, row, part);
          break;
        case 2:
          tile_t<F, 2>(t, row, part);
          break;
        case 3:
          tile_t<F, 3>(t, row, part);
          break;
        default:
          tile_t<F, kRows>(t, row, part);
      }
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

double peak_loop(long iterations) {
  __m256i acc[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) acc[j] = _mm256_set1_epi32(j + 1);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i w = _mm256_set1_epi8(1);
  for (long i = 0; i < iterations; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {  // what a sum of products costs without a dot product
      asm volatile("" : "+x"(w));  // or they would be computed once
      acc[j] = _mm256_add_epi32(acc[j], _mm256_madd_epi16(_mm256_maddubs_epi16(w, w), ones));
    }
  }
#pragma GCC unroll 8
  for (int j = 1; j < 8; ++j) acc[0] = _mm256_add_epi32(acc[0], acc[j]);
  volatile int sink = _mm256_extract_epi32(acc[0], 0);
  (void)sink;
  return double(iterations) * 8 * 32 * 2;
}

}  // namespace

namespace paceline {
extern const QuantKernels kAvx2Quant;
const QuantKernels kAvx2Quant = {"avx2", tile, quantise, peak_loop};
}  // namespace paceline
#endif
