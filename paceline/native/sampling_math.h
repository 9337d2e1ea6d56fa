// Arithmetic that every sampling path shares: the counter-based generator and a logarithm that rounds alike everywhere.
//
// The token at a position is argmax_i(log p_i + g_i). The noise g_i is a pure function of (seed, choice, position,
// token id), so a draw can be repeated by anybody at any time: by the drafter before the target, by the target with or
// without drafts, in any batch. libm's log differs by the last bit between machines (it selects FMA variants at run
// time); portable_log below uses nothing but IEEE additions, multiplications and divisions in a fixed order.
#pragma once

#include <cstdint>
#include <cstring>

namespace paceline::sampling {

// Names of independent random streams: the fourth word of the Philox counter.
enum class Stream : uint32_t {
  kGumbel = 0x47554d42,  // "GUMB": noise of coupled sampling, one word per token id
  kDraft = 0x44524654,   // "DRFT": the drafter's own noise when the sampler is `rejection`
  kAccept = 0x41434350,  // "ACCP": accept or reject a draft
  kNext = 0x4e455854,    // "NEXT": inverse-CDF draw of a residual, bonus or undrafted token
};

struct Words {
  uint32_t w[4];
};

// Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
inline Words philox4x32_10(Words counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.w[0], c1 = counter.w[1], c2 = counter.w[2], c3 = counter.w[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u;
    const uint64_t b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// What is constant along the noise of one row.
struct NoiseKey {
  uint32_t position, choice, stream, key0, key1;

  NoiseKey(uint64_t seed, uint32_t choice_index, uint32_t absolute_position, Stream s)
      : position(absolute_position),
        choice(choice_index),
        stream(static_cast<uint32_t>(s)),
        key0(static_cast<uint32_t>(seed)),
        key1(static_cast<uint32_t>(seed >> 32)) {}
};

// Token ids map to generator output in blocks of 64: 16 counters of 4 words, the word index slowest, so that 16
// neighbouring ids are 16 lanes of one vector and no shuffle is needed.
inline uint32_t noise_counter(uint32_t id) { return ((id >> 6) << 4) | (id & 15u); }
inline uint32_t noise_word(uint32_t id) { return (id >> 4) & 3u; }

inline uint32_t noise_bits(const NoiseKey& key, uint32_t id) {
  const Words out = philox4x32_10({{noise_counter(id), key.position, key.choice, key.stream}}, key.key0, key.key1);
  return out.w[noise_word(id)];
}

// One uniform in (0, 1) with 53 random bits.
inline double uniform53(const NoiseKey& key) {
  const Words out = philox4x32_10({{0, key.position, key.choice, key.stream}}, key.key0, key.key1);
  const uint64_t bits = (static_cast<uint64_t>(out.w[0]) << 32 | out.w[1]) >> 12;  // 52 bits, then centred
  return (static_cast<double>(bits) + 0.5) * 0x1p-52;
}

// Natural logarithm of a positive normal number, within 2 ulp: x = 2^e m with m in [1/sqrt(2), sqrt(2)) and
// log m = 2 atanh((m - 1) / (m + 1)) as a series.
inline double portable_log(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull;
  double m;
  std::memcpy(&m, &bits, sizeof m);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double r = 2.0 / 21.0;
  r = r * z + 2.0 / 19.0;
  r = r * z + 2.0 / 17.0;
  r = r * z + 2.0 / 15.0;
  r = r * z + 2.0 / 13.0;
  r = r * z + 2.0 / 11.0;
  r = r * z + 2.0 / 9.0;
  r = r * z + 2.0 / 7.0;
  r = r * z + 2.0 / 5.0;
  r = r * z + 2.0 / 3.0;
  const double log_m = 2.0 * s + s * (r * z);
  const double e = exponent;
  return e * 6.93147180369123816490e-01 + (e * 1.90821492927058770002e-10 + log_m);
}

// Gumbel noise from 32 random bits: g = -log(-log(1 - v)), v = (bits + 1/2) / 2^32. Small v gives large noise, and 1 -
// v is exact in double, so the upper tail keeps its full resolution. Range: -3.14 to 22.88.
inline double gumbel(uint32_t bits) {
  const double v = (static_cast<double>(bits) + 0.5) * 0x1p-32;
  return -portable_log(-portable_log(1.0 - v));
}

constexpr double kMaxGumbel = 22.88;  // > gumbel(0) = 22.8739

}  // namespace paceline::sampling
