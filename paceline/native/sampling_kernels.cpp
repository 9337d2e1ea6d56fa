#include "sampling_kernels.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PACELINE_SAMPLING_X86 1
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's own AVX-512 header, in _mm512_undefined_*
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace paceline::sampling {
namespace {

// exp(d) for d <= 0 as 2^n * p(r): n = round(d / ln 2), r = d - n ln 2, |r| <= 0.347, p of degree 6 (error 1e-7). Terms
// below e^-86 count as zero: they cannot be seen next to the largest term, which is 1.
constexpr float kExpFloor = -86.0f;
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -2.12194440e-4f;
constexpr float kC6 = 1.3888889e-3f, kC5 = 8.3333333e-3f, kC4 = 4.1666667e-2f, kC3 = 1.6666667e-1f, kC2 = 0.5f;

// gumbel(w) <= -log((w + 1/2) / 2^32) <= ln 2 * (31 - log2(w >> 1)), and the bits of a float read as an integer are a
// piecewise linear lower bound of its log2: the bound is within 0.06 of the noise where noise is large.
constexpr float kBoundBase = 0.69314718f * (31.0f + 127.0f);
constexpr float kBoundSlope = 0.69314718f / 8388608.0f;

namespace portable {

float exp_one(float x, float top, float scale) {
  const float d = (x - top) * scale;
  const float t = d > kExpFloor ? d : kExpFloor;
  const float k = t * kLog2e + kRoundMagic;
  const float n = k - kRoundMagic;
  float r = t - n * kLn2High;
  r = r - n * kLn2Low;
  float p = kC6;
  p = p * r + kC5;
  p = p * r + kC4;
  p = p * r + kC3;
  p = p * r + kC2;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  uint32_t kbits, pbits;
  std::memcpy(&kbits, &k, 4);
  std::memcpy(&pbits, &p, 4);
  pbits += kbits << 23;
  std::memcpy(&p, &pbits, 4);
  return d >= kExpFloor ? p : 0.0f;
}

float block_maxima(const float* x, int blocks, float* maxima) {
  float best = -std::numeric_limits<float>::infinity();
  for (int b = 0; b < blocks; ++b, x += kBlock) {
    float lanes[16];
    for (float& lane : lanes) lane = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < kBlock; i += 16)
      for (int l = 0; l < 16; ++l) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
    maxima[b] = lanes[0];
    for (float lane : lanes) maxima[b] = lane > maxima[b] ? lane : maxima[b];
    best = maxima[b] > best ? maxima[b] : best;
  }
  return best;
}

uint64_t mask_ge(const float* x, float threshold) {
  uint64_t mask = 0;
  for (int i = 0; i < kBlock; ++i) mask |= static_cast<uint64_t>(x[i] >= threshold) << i;
  return mask;
}

void exp_block(const float* x, float top, float scale, float* out) {
  for (int i = 0; i < kBlock; ++i) out[i] = exp_one(x[i], top, scale);
}

void sum_exp(const float* x, const float* maxima, int blocks, float top, float scale, double* lanes) {
  float e[kBlock];
  for (int b = 0; b < blocks; ++b, x += kBlock) {
    if (!((maxima[b] - top) * scale >= kExpFloor)) continue;
    exp_block(x, top, scale, e);
    for (int i = 0; i < kBlock; i += 16)
      for (int l = 0; l < 16; ++l) lanes[l] += static_cast<double>(e[i + l]);
  }
}

void noise_ids(const int32_t* ids, const NoiseKey& key, uint32_t* words) {
  for (int i = 0; i < kBlock; ++i) words[i] = noise_bits(key, static_cast<uint32_t>(ids[i]));
}

uint64_t bound_mask(const float* x, const uint32_t* words, float top, float scale, float threshold) {
  float bound[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const float half = static_cast<float>(static_cast<int32_t>(words[i] >> 1));
    int32_t bits;
    std::memcpy(&bits, &half, 4);
    bound[i] = (x[i] - top) * scale + (kBoundBase - kBoundSlope * static_cast<float>(bits));
  }
  return mask_ge(bound, threshold);
}

int scan_noise(const float* x, const float* maxima, int begin, int end, const NoiseKey& key, float top, float scale,
               float threshold, uint32_t* words, uint64_t* mask) {
  for (int b = begin; b < end; ++b) {
    if (!((maxima[b] - top) * scale + static_cast<float>(kMaxGumbel) >= threshold)) continue;
    uint32_t c0[16], c1[16], c2[16], c3[16], key0 = key.key0, key1 = key.key1;
    for (uint32_t l = 0; l < 16; ++l) {
      c0[l] = static_cast<uint32_t>(b) * 16 + l;
      c1[l] = key.position;
      c2[l] = key.choice;
      c3[l] = key.stream;
    }
    for (int round = 0; round < 10; ++round) {  // lanes innermost, for the compiler to vectorise
      for (int l = 0; l < 16; ++l) {
        const uint64_t p = static_cast<uint64_t>(c0[l]) * 0xD2511F53u;
        const uint64_t q = static_cast<uint64_t>(c2[l]) * 0xCD9E8D57u;
        c0[l] = static_cast<uint32_t>(q >> 32) ^ c1[l] ^ key0;
        c2[l] = static_cast<uint32_t>(p >> 32) ^ c3[l] ^ key1;
        c1[l] = static_cast<uint32_t>(q);
        c3[l] = static_cast<uint32_t>(p);
      }
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    std::memcpy(words, c0, sizeof c0);
    std::memcpy(words + 16, c1, sizeof c1);
    std::memcpy(words + 32, c2, sizeof c2);
    std::memcpy(words + 48, c3, sizeof c3);
    *mask = bound_mask(x + b * kBlock, words, top, scale, threshold);
    if (*mask != 0) return b;
  }
  return end;
}

constexpr Kernels kTable = {"portable", block_maxima, mask_ge, sum_exp, exp_block, scan_noise, noise_ids, bound_mask};

}  // namespace portable

#ifdef PACELINE_SAMPLING_X86

#define PACELINE_TARGET __attribute__((target("avx2")))
#define PACELINE_OP PACELINE_TARGET inline __attribute__((always_inline))

namespace avx2 {

constexpr int kWidth = 8;
constexpr int kChains = 2;  // independent Philox chains that hide the latency of the multiplier
using F = __m256;
using I = __m256i;

PACELINE_OP F load(const float* p) { return _mm256_loadu_ps(p); }
PACELINE_OP void store(float* p, F a) { _mm256_storeu_ps(p, a); }
PACELINE_OP I loadi(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
PACELINE_OP void storei(void* p, I a) { _mm256_storeu_si256(static_cast<I*>(p), a); }
PACELINE_OP F splat(float a) { return _mm256_set1_ps(a); }
PACELINE_OP I splati(uint32_t a) { return _mm256_set1_epi32(static_cast<int>(a)); }
PACELINE_OP I iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
PACELINE_OP F add(F a, F b) { return _mm256_add_ps(a, b); }
PACELINE_OP F sub(F a, F b) { return _mm256_sub_ps(a, b); }
PACELINE_OP F mul(F a, F b) { return _mm256_mul_ps(a, b); }
PACELINE_OP F max(F a, F b) { return _mm256_max_ps(a, b); }
PACELINE_OP I addi(I a, I b) { return _mm256_add_epi32(a, b); }
PACELINE_OP I andi(I a, I b) { return _mm256_and_si256(a, b); }
PACELINE_OP I ori(I a, I b) { return _mm256_or_si256(a, b); }
PACELINE_OP I xor3(I a, I b, I c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
template <int n>
PACELINE_OP I shl(I a) {
  return _mm256_slli_epi32(a, n);
}
template <int n>
PACELINE_OP I shr(I a) {
  return _mm256_srli_epi32(a, n);
}
PACELINE_OP F to_float(I a) { return _mm256_cvtepi32_ps(a); }
PACELINE_OP I bits(F a) { return _mm256_castps_si256(a); }
PACELINE_OP F from_bits(I a) { return _mm256_castsi256_ps(a); }
PACELINE_OP uint32_t ge(F a, F b) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ))); }
PACELINE_OP F zero_unless_ge(F value, F a, F b) { return _mm256_and_ps(value, _mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
PACELINE_OP I where_equal(I a, I b, I yes, I no) { return _mm256_blendv_epi8(no, yes, _mm256_cmpeq_epi32(a, b)); }
PACELINE_OP void mul_wide(I a, I m, I& high, I& low) {
  const I even = _mm256_mul_epu32(a, m);
  const I odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), m);
  high = _mm256_blend_epi32(_mm256_shuffle_epi32(even, 0xB1), odd, 0xAA);
  low = _mm256_blend_epi32(even, _mm256_shuffle_epi32(odd, 0xB1), 0xAA);
}
PACELINE_OP float max_lane(F a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
struct Sum {  // kWidth doubles
  __m256d low, high;
};
PACELINE_OP Sum load_sum(const double* p) { return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}; }
PACELINE_OP void store_sum(double* p, const Sum& s) {
  _mm256_storeu_pd(p, s.low);
  _mm256_storeu_pd(p + 4, s.high);
}
PACELINE_OP Sum accumulate(const Sum& s, F a) {
  return {_mm256_add_pd(s.low, _mm256_cvtps_pd(_mm256_castps256_ps128(a))),
          _mm256_add_pd(s.high, _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)))};
}

#include "sampling_kernels.inl"

constexpr Kernels kTable = {"avx2", block_maxima, mask_ge, sum_exp, exp_block, scan_noise, noise_ids, bound_mask};

}  // namespace avx2

#undef PACELINE_TARGET
#define PACELINE_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

namespace avx512 {

constexpr int kWidth = 16;
constexpr int kChains = 1;
using F = __m512;
using I = __m512i;

PACELINE_OP F load(const float* p) { return _mm512_loadu_ps(p); }
PACELINE_OP void store(float* p, F a) { _mm512_storeu_ps(p, a); }
PACELINE_OP I loadi(const void* p) { return _mm512_loadu_si512(p); }
PACELINE_OP void storei(void* p, I a) { _mm512_storeu_si512(p, a); }
PACELINE_OP F splat(float a) { return _mm512_set1_ps(a); }
PACELINE_OP I splati(uint32_t a) { return _mm512_set1_epi32(static_cast<int>(a)); }
PACELINE_OP I iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
PACELINE_OP F add(F a, F b) { return _mm512_add_ps(a, b); }
PACELINE_OP F sub(F a, F b) { return _mm512_sub_ps(a, b); }
PACELINE_OP F mul(F a, F b) { return _mm512_mul_ps(a, b); }
PACELINE_OP F max(F a, F b) { return _mm512_max_ps(a, b); }
PACELINE_OP I addi(I a, I b) { return _mm512_add_epi32(a, b); }
PACELINE_OP I andi(I a, I b) { return _mm512_and_si512(a, b); }
PACELINE_OP I ori(I a, I b) { return _mm512_or_si512(a, b); }
PACELINE_OP I xor3(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
template <int n>
PACELINE_OP I shl(I a) {
  return _mm512_slli_epi32(a, n);
}
template <int n>
PACELINE_OP I shr(I a) {
  return _mm512_srli_epi32(a, n);
}
PACELINE_OP F to_float(I a) { return _mm512_cvtepi32_ps(a); }
PACELINE_OP I bits(F a) { return _mm512_castps_si512(a); }
PACELINE_OP F from_bits(I a) { return _mm512_castsi512_ps(a); }
PACELINE_OP uint32_t ge(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
PACELINE_OP F zero_unless_ge(F value, F a, F b) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), value);
}
PACELINE_OP I where_equal(I a, I b, I yes, I no) {
  return _mm512_mask_mov_epi32(no, _mm512_cmpeq_epi32_mask(a, b), yes);
}
PACELINE_OP void mul_wide(I a, I m, I& high, I& low) {
  const I even = _mm512_mul_epu32(a, m);
  const I odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
  high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_CDAB);
  low = _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CDAB);
}
PACELINE_OP float max_lane(F a) { return _mm512_reduce_max_ps(a); }
struct Sum {  // kWidth doubles
  __m512d low, high;
};
PACELINE_OP Sum load_sum(const double* p) { return {_mm512_loadu_pd(p), _mm512_loadu_pd(p + 8)}; }
PACELINE_OP void store_sum(double* p, const Sum& s) {
  _mm512_storeu_pd(p, s.low);
  _mm512_storeu_pd(p + 8, s.high);
}
PACELINE_OP Sum accumulate(const Sum& s, F a) {
  return {_mm512_add_pd(s.low, _mm512_cvtps_pd(_mm512_castps512_ps256(a))),
          _mm512_add_pd(s.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)))};
}

#include "sampling_kernels.inl"

constexpr Kernels kTable = {"avx512", block_maxima, mask_ge, sum_exp, exp_block, scan_noise, noise_ids, bound_mask};

}  // namespace avx512

#undef PACELINE_OP
#undef PACELINE_TARGET

bool has_avx2() { return __builtin_cpu_supports("avx2"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#endif  // PACELINE_SAMPLING_X86

const Kernels* find(const char* name) {
  const bool any = *name == '\0';
#ifdef PACELINE_SAMPLING_X86
  if ((any || std::strcmp(name, "avx512") == 0) && has_avx512()) return &avx512::kTable;
  if ((any || std::strcmp(name, "avx2") == 0) && has_avx2()) return &avx2::kTable;
#endif
  return any || std::strcmp(name, "portable") == 0 ? &portable::kTable : nullptr;
}

// PACELINE_ISA forces the whole engine onto a path; its names beyond "avx512" ("avx512bf16", ...) share this one.
const Kernels* initial() {
  const char* forced = std::getenv("PACELINE_ISA");
  const Kernels* chosen = nullptr;
  if (forced != nullptr && std::strncmp(forced, "avx512", 6) != 0) chosen = find(forced);
  return chosen != nullptr ? chosen : find("");
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table{initial()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

bool select_kernels(const char* name) {
  const Kernels* table = *name == '\0' ? initial() : find(name);
  if (table == nullptr) return false;
  current().store(table, std::memory_order_relaxed);
  return true;
}

}  // namespace paceline::sampling
