#include "quant.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "amx.h"
#include "kernels.h"

namespace paceline {
namespace {

float from_half(const uint8_t* src) {
  uint16_t h;
  std::memcpy(&h, src, 2);
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  const uint32_t u = magnitude >= 0x7c00u ? 0x7f800000u | ((magnitude & 0x3ffu) << 13) : magnitude << 13;
  float x;
  std::memcpy(&x, &u, 4);
  if (magnitude < 0x7c00u) x *= 0x1p112f;  // exact, subnormals included
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits |= sign;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Nearest half, ties to even; |x| <= 65504.
uint16_t to_half(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u < 0x38800000u) {  // subnormal: units of 2^-24
    float magnitude;
    std::memcpy(&magnitude, &u, 4);
    return uint16_t(sign | uint32_t(std::nearbyint(magnitude * 0x1p24f)));
  }
  u += 0xfffu + ((u >> 13) & 1);
  return uint16_t(sign | ((u - 0x38000000u) >> 13));
}

bool put_half(uint8_t* to, float x, float* stored) {
  if (!(std::fabs(x) <= 65504.0f)) return false;
  const uint16_t h = to_half(x);
  std::memcpy(to, &h, 2);
  *stored = from_half(to);
  return true;
}

float largest(const float* x, int n) {
  float most = 0;
  for (int i = 0; i < n; ++i) {
    const float a = std::fabs(x[i]);
    if (a != a) return a;
    most = a > most ? a : most;
  }
  return most;
}

int rounded(float x, int low, int high) {
  const float r = std::nearbyint(x);
  return r < float(low) ? low : r > float(high) ? high : int(r);
}

float inverse(float x) { return std::fabs(x) < 0x1p-100f ? 0.0f : 1.0f / x; }

int nibble(const uint8_t* block, int i) { return i < 16 ? block[i] & 15 : block[i - 16] >> 4; }

size_t block_bytes(Quant f) { return f == Quant::kInt8 ? 34 : f == Quant::kInt4 ? 18 : 20; }

bool quantise_block(Quant f, const float* x, int n, uint8_t* out) {
  std::memset(out, 0, block_bytes(f));
  float d = 0;
  if (f == Quant::kInt8) {
    const float most = largest(x, n);
    if (!std::isfinite(most) || !put_half(out, most / 127.0f, &d)) return false;
    const float scale = inverse(d);
    for (int i = 0; i < n; ++i) out[2 + i] = uint8_t(int8_t(rounded(x[i] * scale, -127, 127)));
    return true;
  }
  uint8_t* q = out + (f == Quant::kInt4 ? 2 : 4);
  float m = 0;
  if (f == Quant::kInt4) {  // the value furthest from 0 becomes -8
    float far = 0;
    for (int i = 0; i < n; ++i) far = std::fabs(x[i]) > std::fabs(far) ? x[i] : far;
    if (!std::isfinite(largest(x, n)) || !put_half(out, far / -8.0f, &d)) return false;
  } else {
    float low = x[0], high = x[0];
    for (int i = 0; i < n; ++i) {
      if (!std::isfinite(x[i])) return false;
      low = x[i] < low ? x[i] : low;
      high = x[i] > high ? x[i] : high;
    }
    if (!put_half(out + 2, low, &m) || !put_half(out, (high - m) / 15.0f, &d)) return false;
  }
  const float scale = inverse(d);
  for (int i = 0; i < kGroup; ++i) {
    const float value = i < n ? x[i] : 0.0f;
    const int code = f == Quant::kInt4 ? rounded(value * scale + 8.0f, 0, 15) : rounded((value - m) * scale, 0, 15);
    q[i % 16] = uint8_t(q[i % 16] | code << (i < 16 ? 0 : 4));
  }
  return true;
}

#if defined(PACELINE_AMX)
// Measured on a Xeon of the fourth generation or later, two threads that stream weights: with 8 rows 1.07 of the time,
// with 9 and 10 alike, with 11 and 12 0.95 to 0.97.
constexpr int kWideRows = 12;

const QuantKernels& amx_quant() {
  static const QuantKernels kernels = [] {
    QuantKernels k = kVnniQuant;
    k.name = "amx";
    k.wide_rows = kWideRows;
    k.wide_begin = amx_quant_begin;
    k.wide_tile = amx_quant_tile;
    k.wide_end = amx_quant_end;
    return k;
  }();
  return kernels;
}
#endif

}  // namespace

int QuantKernels::tile_rows(int rows) const {
  const int most = wide_rows && rows >= wide_rows ? kMaxQuantRows : kQuantRows;
  const int tiles = (rows + most - 1) / most;
  return tiles > 1 ? (rows + tiles - 1) / tiles : std::max(rows, 1);
}

const QuantKernels& quant_kernels_for(const char* isa) {
#if defined(__x86_64__)
  const std::string name = isa;
  __builtin_cpu_init();
  if (name == "avx2" || (name != "portable" && !__builtin_cpu_supports("avx512vnni"))) return kAvx2Quant;
#if defined(PACELINE_AMX)
  if (name == "amx") return amx_quant();
#endif
  if (name != "portable") return kVnniQuant;
#endif
  return kPortableQuant;
}

size_t quant_row_bytes(Quant f, int k) {
  if (f == Quant::kInt8Channel) return 4 + size_t(k);
  return size_t(quant_groups(k)) * block_bytes(f);
}

bool quantise_weights(Quant f, const float* row, int k, uint8_t* out) {
  if (f != Quant::kInt8Channel) {
    for (int g = 0; g < quant_groups(k); ++g) {
      const int n = k - g * kGroup < kGroup ? k - g * kGroup : kGroup;
      if (!quantise_block(f, row + g * kGroup, n, out + size_t(g) * block_bytes(f))) return false;
    }
    return true;
  }
  const float most = largest(row, k);
  if (!std::isfinite(most)) return false;
  const float d = most / 127.0f, scale = inverse(d);
  std::memcpy(out, &d, 4);
  for (int i = 0; i < k; ++i) out[4 + i] = uint8_t(int8_t(rounded(row[i] * scale, -127, 127)));
  return true;
}

void pack_quant_row(Quant f, const uint8_t* row, int k, uint8_t* panel, int column) {
  const int half = column / 16, lane = column % 16;
  if (f == Quant::kInt8Channel) std::memcpy(panel + column * 4, row, 4);
  for (int g = 0; g < quant_groups(k); ++g) {
    uint8_t* group = panel + quant_header_bytes(f) + size_t(g) * quant_group_bytes(f);
    uint8_t* to = group + size_t(half) * quant_half_bytes(f) + lane * 4;
    uint8_t* scales = group + 2 * quant_half_bytes(f);
    if (f == Quant::kInt8Channel) {
      for (int i = 0; i < kGroup; ++i) {
        const int at = g * kGroup + i;
        to[i / 4 * 64 + i % 4] = uint8_t((at < k ? row[4 + at] : 0) ^ 0x80);
      }
      continue;
    }
    const uint8_t* block = row + size_t(g) * block_bytes(f);
    std::memcpy(scales + column * 2, block, 2);
    if (f == Quant::kInt8) {
      for (int i = 0; i < kGroup; ++i) to[i / 4 * 64 + i % 4] = uint8_t(block[2 + i] ^ 0x80);
    } else {  // a byte of ggml's block holds k and k + 16, as a byte of ours does
      if (f == Quant::kInt4Min) std::memcpy(scales + 64 + column * 2, block + 2, 2);
      const uint8_t* q = block + (f == Quant::kInt4 ? 2 : 4);
      for (int j = 0; j < 4; ++j) std::memcpy(to + j * 64, q + j * 4, 4);
    }
  }
}

void unpack_quant_row(Quant f, const uint8_t* panel, int column, int k, float* out) {
  const int half = column / 16, lane = column % 16;
  for (int g = 0; g < quant_groups(k); ++g) {
    const uint8_t* group = panel + quant_header_bytes(f) + size_t(g) * quant_group_bytes(f);
    const uint8_t* from = group + size_t(half) * quant_half_bytes(f) + lane * 4;
    const uint8_t* scales = group + 2 * quant_half_bytes(f);
    float d, m = 0;
    if (f == Quant::kInt8Channel)
      std::memcpy(&d, panel + column * 4, 4);
    else
      d = from_half(scales + column * 2);
    if (f == Quant::kInt4Min) m = from_half(scales + 64 + column * 2);
    for (int i = 0; i < kGroup && g * kGroup + i < k; ++i) {
      float& x = out[g * kGroup + i];
      if (f == Quant::kInt8 || f == Quant::kInt8Channel) {
        x = d * float(int(from[i / 4 * 64 + i % 4]) - 128);
      } else {
        uint8_t bytes[16];
        for (int j = 0; j < 4; ++j) std::memcpy(bytes + j * 4, from + j * 64, 4);
        x = f == Quant::kInt4 ? d * float(nibble(bytes, i) - 8) : d * float(nibble(bytes, i)) + m;
      }
    }
  }
}

}  // namespace paceline
