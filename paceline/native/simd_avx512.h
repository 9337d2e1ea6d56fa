// Sixteen fp32 lanes as one AVX-512 register; with PACELINE_BF16_DOT also the bf16 dot product.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

using V = __m512;
using Pairs = __m512i;
using I = __m512i;
#ifdef PACELINE_BF16_DOT
using Quads = __m512i;  // four bytes to a lane, with their offset
#else
struct Quads {  // as 16-bit pairs of the even and of the odd ones
  __m512i even, odd;
};
#endif

struct S {
  static constexpr int kPanelRows = 12;
  static constexpr int kHalfRows = 12;  // rows of a tile half a panel wide
  static constexpr int kQueryTile = 6;
  static constexpr int kPeakSums = 24;
  // registers of values that attention sums up at a time for so many query vectors
  static constexpr int value_vectors(int) { return 4; }
#ifdef PACELINE_BF16_DOT
  static constexpr bool kBf16Dot = true;
  static constexpr const char* kName = "avx512_bf16";
  static V dot_pairs(V acc, Pairs w, uint32_t a) {
    return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(a)));
  }
#else
  static constexpr bool kBf16Dot = false;
  static constexpr const char* kName = "avx512";
#endif

  static V zero() { return _mm512_setzero_ps(); }
  static V set1(float x) { return _mm512_set1_ps(x); }
  static V distinct(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V a) { _mm512_storeu_ps(p, a); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  // a / b for b >= 1, within 2 ulp: a division blocks its port for 16 cycles
  static V quotient(V a, V b) {
    V r = _mm512_rcp14_ps(b);
    r = _mm512_fmadd_ps(_mm512_fnmadd_ps(b, r, _mm512_set1_ps(1.0f)), r, r);
    r = _mm512_fmadd_ps(_mm512_fnmadd_ps(b, r, _mm512_set1_ps(1.0f)), r, r);
    return _mm512_mul_ps(a, r);
  }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static V min(V a, V b) { return _mm512_min_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
  }
  static Pairs load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static V even(Pairs p) { return _mm512_castsi512_ps(_mm512_slli_epi32(p, 16)); }
  static V odd(Pairs p) { return _mm512_castsi512_ps(_mm512_and_si512(p, _mm512_set1_epi32(int(0xffff0000u)))); }
  static __m512i bf16_bits(V x) {  // rounded to nearest even, in the low half of each lane
    const __m512i u = _mm512_castps_si512(x);
    const __m512i odd_bit = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd_bit, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i nan = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    return _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
  }
#ifdef PACELINE_BF16_DOT  // the same, but for values below 2^-126, which become 0
  static void store_bf16(uint16_t* p, V a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a)); }
#else
  static void store_bf16(uint16_t* p, V a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(bf16_bits(a))); }
#endif
  static V round_bf16(V a) { return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(a), 16)); }
  static V keep(V a, int lo, int hi, float fill) {
    lo = lo < 0 ? 0 : lo > 16 ? 16 : lo;
    hi = hi < 0 ? 0 : hi > 16 ? 16 : hi;
    const __mmask16 m = __mmask16(((1u << hi) - 1) & ~((1u << lo) - 1));
    return _mm512_mask_mov_ps(_mm512_set1_ps(fill), m, a);
  }
  static V nearest(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V ldexp_int(V p, V n) { return _mm512_scalef_ps(p, n); }
  static V zero_below(V r, V x, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), r);
  }
  static void store_int8(int8_t* p, V a) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
  }
  static V load_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
#ifdef PACELINE_BF16_DOT  // every processor with these has byte dot products (isa.cpp)
  static I quads_start(int32_t sum) { return _mm512_set1_epi32(-128 * sum); }
  static Quads load_quads(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static I dot_quads(I acc, Quads k, int32_t four) { return _mm512_dpbusd_epi32(acc, k, _mm512_set1_epi32(four)); }
#else
  static I quads_start(int32_t) { return _mm512_setzero_si512(); }
  static Quads load_quads(const uint8_t* p) {
    const __m512i x = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
    return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
  }
  static I dot_quads(I acc, Quads k, int32_t four) {
    const __m512i q = _mm512_set1_epi32(four);
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(q, 8), 8), odd = _mm512_srai_epi16(q, 8);
    return _mm512_add_epi32(acc, _mm512_add_epi32(_mm512_madd_epi16(k.even, even), _mm512_madd_epi16(k.odd, odd)));
  }
#endif
  static V to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static float sum8(__m256 x) {
    __m128 h = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_add_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_add_ss(h, _mm_shuffle_ps(h, h, 1)));
  }
  static float max8(__m256 x) {
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
  }
  static float lane_sum(V x) { return sum8(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1))); }
  static float lane_max(V x) { return max8(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1))); }
  static void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // second-level cache
  static void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
};

}  // namespace
