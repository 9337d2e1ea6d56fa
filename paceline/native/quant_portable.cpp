// The quantised kernels in plain C++: their definition.
#include <cmath>
#include <cstring>

#include "quant.h"

namespace {

using paceline::kGroup;
using paceline::kMagicBits;
using paceline::Quant;
using paceline::QuantGroup;
using paceline::QuantTile;

float half_to_float(const uint8_t* src) {
  uint16_t h;
  memcpy(&h, src, 2);
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  uint32_t u = magnitude >= 0x7c00u ? 0x7f800000u | ((magnitude & 0x3ffu) << 13) : magnitude << 13;
  float x;
  memcpy(&x, &u, 4);
  if (magnitude < 0x7c00u) x *= 0x1p112f;
  memcpy(&u, &x, 4);
  u |= sign;
  memcpy(&x, &u, 4);
  return x;
}

// Sixteen columns of one group times one row, exactly.
template <Quant F>
void integer_sums(const QuantGroup& a, const uint8_t* w, int32_t* sum) {
  constexpr bool kInt8 = paceline::is_int8(F);
  for (int c = 0; c < 16; ++c)
    sum[c] = kInt8 ? a.start_int8 - kMagicBits : F == Quant::kInt4 ? a.start_int4 - kMagicBits : 0;
  for (int j = 0; j < (kInt8 ? 8 : 4); ++j)
    for (int c = 0; c < 16; ++c) {
      const uint8_t* at = w + j * 64 + c * 4;
      int32_t s = 0;
      for (int b = 0; b < 4; ++b) {
        if (kInt8)
          s += int32_t(at[b]) * a.q[j * 4 + b];
        else
          s += int32_t(at[b] & 15) * a.q[j * 4 + b] + int32_t(at[b] >> 4) * a.q[16 + j * 4 + b];
      }
      sum[c] += s;
    }
}

template <Quant F>
void tile_t(const QuantTile& t) {
  for (int r = 0; r < t.rows; ++r)
    for (int half = 0; half < 2; ++half) {
      float acc[16] = {0};
      const QuantGroup* a = t.a + r;
      const uint8_t* w = t.w + paceline::quant_header_bytes(F);
      for (int g = 0; g < t.groups; ++g, a += t.stride, w += paceline::quant_group_bytes(F)) {
        int32_t sum[16];
        integer_sums<F>(*a, w + half * paceline::quant_half_bytes(F), sum);
        const uint8_t* scales = w + 2 * paceline::quant_half_bytes(F) + half * 32;
        for (int c = 0; c < 16; ++c) {
          const float exact = float(sum[c]);
          const float scaled = F == Quant::kInt8Channel ? exact : exact * half_to_float(scales + c * 2);
          acc[c] = std::fma(scaled, a->scale, acc[c]);
          if (F == Quant::kInt4Min) acc[c] = std::fma(half_to_float(scales + 64 + c * 2), a->scaled_sum, acc[c]);
        }
      }
      for (int c = 0; c < 16; ++c) {
        float scale = 1;
        if (F == Quant::kInt8Channel) memcpy(&scale, t.w + (half * 16 + c) * 4, 4);
        t.out[size_t(r) * t.ld + half * 16 + c] = F == Quant::kInt8Channel ? acc[c] * scale : acc[c];
      }
    }
}

void tile(Quant format, const QuantTile& t) {
  switch (format) {
    case Quant::kInt8:
      return tile_t<Quant::kInt8>(t);
    case Quant::kInt8Channel:
      return tile_t<Quant::kInt8Channel>(t);
    case Quant::kInt4:
      return tile_t<Quant::kInt4>(t);
    case Quant::kInt4Min:
      return tile_t<Quant::kInt4Min>(t);
    case Quant::kNone:
      break;
  }
}

// Nearest integer of |x| < 2^22, ties to even, as bits: anything else gives some number, never undefined behaviour.
int32_t nearest(float x) {
  volatile float shifted = x + 12582912.0f;  // 1.5 * 2^23
  const float s = shifted;
  uint32_t u;
  memcpy(&u, &s, 4);
  return int32_t(u - 0x4b400000u);
}

void quantise(const void* x, bool bf16, int k, QuantGroup* out, size_t stride) {
  for (int from = 0; from < k; from += kGroup, out += stride) {
    uint32_t bits[kGroup] = {0}, most = 0;
    for (int i = 0; i < kGroup && from + i < k; ++i) {
      if (bf16)
        bits[i] = uint32_t(static_cast<const uint16_t*>(x)[from + i]) << 16;
      else
        memcpy(&bits[i], static_cast<const float*>(x) + from + i, 4);
      const uint32_t magnitude = bits[i] & 0x7fffffffu;  // NaN is the largest: it must not get lost
      if (magnitude > most) most = magnitude;
    }
    float amax;
    memcpy(&amax, &most, 4);
    const bool tiny = amax < 0x1p-100f;
    const float inv = tiny ? 0.0f : 127.0f / amax;
    uint32_t sum = 0;
    for (int i = 0; i < kGroup; ++i) {
      float value;
      memcpy(&value, &bits[i], 4);
      const int32_t q = nearest(value * inv);
      out->q[i] = int8_t(uint8_t(uint32_t(q)));
      sum += uint32_t(int32_t(out->q[i]));
    }
    out->scale = tiny ? 0.0f : amax / 127.0f;
    out->start_int8 = int32_t(uint32_t(kMagicBits) - 128u * sum);
    out->start_int4 = int32_t(uint32_t(kMagicBits) - 8u * sum);
    out->scaled_sum = out->scale * float(int32_t(sum));
  }
}

double peak_loop(long iterations, bool) {
  alignas(64) uint8_t w[512];
  QuantGroup a{};
  for (int i = 0; i < 512; ++i) w[i] = uint8_t(i);
  for (int i = 0; i < kGroup; ++i) a.q[i] = int8_t(i);
  int32_t sum[16], total = 0;
  iterations /= 16;
  for (long i = 0; i < iterations; ++i) {
    a.q[0] = int8_t(total);
    integer_sums<Quant::kInt8>(a, w, sum);
    total += sum[0];
  }
  volatile int32_t sink = total;
  (void)sink;
  return double(iterations) * 16 * kGroup * 2;
}

}  // namespace

namespace paceline {
const QuantKernels kPortableQuant = {"portable", tile, quantise, peak_loop, 6};
}  // namespace paceline
