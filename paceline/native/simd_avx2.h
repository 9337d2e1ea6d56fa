// Sixteen fp32 lanes as two AVX2 registers, with fused multiply-add.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define PACELINE_NARROW 1  // products and attention as in narrow.inl

namespace {

struct V {
  __m256 lo, hi;
};
struct I {
  __m256i lo, hi;
};
struct Quads {  // four int8 to a lane, as 16-bit pairs of the even and of the odd ones
  __m256i even[2], odd[2];
};

struct S {
  static constexpr int kQueryTile = 6;
  static constexpr int kPeakSums = 6;
  // registers of values that attention sums up at a time for so many query vectors
  static constexpr int value_vectors(int vectors) { return vectors == 1 ? 4 : vectors == 2 ? 2 : 1; }
  static constexpr bool kBf16Dot = false;
  static constexpr const char* kName = "avx2";

  static V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static V distinct(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x + 0.5f)}; }  // in its halves, too
  static V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, V a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
  }
  static V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  static V quotient(V a, V b) { return div(a, b); }
  static V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  static V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  static V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
  static __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
  static V load_bf16(const uint16_t* p) {
    return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)(p + 8)))};
  }
  static __m256i bf16_bits(__m256 x) {  // rounded to nearest even, in the low half of each lane
    const __m256i u = _mm256_castps_si256(x);
    const __m256i odd_bit = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd_bit, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(r, nan, is_nan);
  }
  static void store_bf16(uint16_t* p, V a) {
    const __m256i packed = _mm256_packus_epi32(bf16_bits(a.lo), bf16_bits(a.hi));
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
  }
  static V round_bf16(V a) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(a.lo), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(a.hi), 16))};
  }
  static V keep(V a, int lo, int hi, float fill) {
    const __m256i i0 = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i i1 = _mm256_add_epi32(i0, _mm256_set1_epi32(8));
    const __m256i l = _mm256_set1_epi32(lo), h = _mm256_set1_epi32(hi);
    const __m256 f = _mm256_set1_ps(fill);
    const auto pick = [&](__m256i i, __m256 x) {
      const __m256i in = _mm256_andnot_si256(_mm256_cmpgt_epi32(l, i), _mm256_cmpgt_epi32(h, i));
      return _mm256_blendv_ps(f, x, _mm256_castsi256_ps(in));
    };
    return {pick(i0, a.lo), pick(i1, a.hi)};
  }
  static V nearest(V x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
  }
  static __m256 pow2(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static V ldexp_int(V p, V n) { return {_mm256_mul_ps(p.lo, pow2(n.lo)), _mm256_mul_ps(p.hi, pow2(n.hi))}; }
  static V zero_below(V r, V x, float limit) {
    const __m256 l = _mm256_set1_ps(limit);
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, l, _CMP_LT_OQ), r.lo),
            _mm256_andnot_ps(_mm256_cmp_ps(x.hi, l, _CMP_LT_OQ), r.hi)};
  }
  static void store_int8(int8_t* p, V a) {
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    const __m256i sorted = _mm256_permute4x64_epi64(both, 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(sorted), _mm256_extracti128_si256(sorted, 1)));
  }
  static V load_int8(const int8_t* p) {
    const __m128i x = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
  }
  static I quads_start(int32_t sum) {  // keys have an offset of 128
    return {_mm256_set1_epi32(-128 * sum), _mm256_set1_epi32(-128 * sum)};
  }
  static Quads load_quads(const uint8_t* p) {
    Quads r;
    for (int i = 0; i < 2; ++i) {
      const __m256i x = _mm256_loadu_si256((const __m256i*)(p + 32 * i));
      r.even[i] = _mm256_and_si256(x, _mm256_set1_epi16(255));
      r.odd[i] = _mm256_srli_epi16(x, 8);
    }
    return r;
  }
  static V to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
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
  static float lane_sum(V x) { return sum8(_mm256_add_ps(x.lo, x.hi)); }
  static float lane_max(V x) { return max8(_mm256_max_ps(x.lo, x.hi)); }
  static void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }  // second-level cache
  static void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
};

}  // namespace
