// Sixteen fp32 lanes in plain C++: runs anywhere, and is the model that the other paths follow.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

struct V {
  float v[16];
};
struct Pairs {  // sixteen (even k, odd k) bf16 pairs
  uint32_t v[16];
};

struct I {  // sixteen int32
  int32_t v[16];
};
struct Quads {  // four int8 to a lane
  int8_t v[64];
};

#define PL_EACH for (int i = 0; i < 16; ++i)

struct S {
  static constexpr int kPanelRows = 2;  // rows of a tile one panel wide
  static constexpr int kHalfRows = 2;   // rows of a tile half a panel wide
  static constexpr int kQueryTile = 2;
  static constexpr int kPeakSums = 24;
  // registers of values that attention sums up at a time for so many query vectors
  static constexpr int value_vectors(int) { return 4; }
  static constexpr bool kBf16Dot = false;
  static constexpr const char* kName = "portable";

  static V zero() { return V{}; }
  static V set1(float x) {
    V r;
    PL_EACH r.v[i] = x;
    return r;
  }
  static V distinct(float x) { return set1(x); }
  static V load(const float* p) {
    V r;
    memcpy(r.v, p, 64);
    return r;
  }
  static void store(float* p, const V& a) { memcpy(p, a.v, 64); }
  static V add(const V& a, const V& b) {
    V r;
    PL_EACH r.v[i] = a.v[i] + b.v[i];
    return r;
  }
  static V sub(const V& a, const V& b) {
    V r;
    PL_EACH r.v[i] = a.v[i] - b.v[i];
    return r;
  }
  static V mul(const V& a, const V& b) {
    V r;
    PL_EACH r.v[i] = a.v[i] * b.v[i];
    return r;
  }
  static V div(const V& a, const V& b) {
    V r;
    PL_EACH r.v[i] = a.v[i] / b.v[i];
    return r;
  }
  static V quotient(const V& a, const V& b) { return div(a, b); }
  static V max(const V& a, const V& b) {
    V r;
    PL_EACH r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return r;
  }
  static V fma(const V& a, const V& b, const V& c) {
    V r;
    PL_EACH r.v[i] = a.v[i] * b.v[i] + c.v[i];
    return r;
  }
  static V load_bf16(const uint16_t* p) {
    V r;
    PL_EACH {
      uint32_t u = uint32_t(p[i]) << 16;
      memcpy(&r.v[i], &u, 4);
    }
    return r;
  }
  static Pairs load_pairs(const uint16_t* p) {
    Pairs r;
    memcpy(r.v, p, 64);
    return r;
  }
  static V even(const Pairs& p) {
    V r;
    PL_EACH {
      uint32_t u = p.v[i] << 16;
      memcpy(&r.v[i], &u, 4);
    }
    return r;
  }
  static V odd(const Pairs& p) {
    V r;
    PL_EACH {
      uint32_t u = p.v[i] & 0xffff0000u;
      memcpy(&r.v[i], &u, 4);
    }
    return r;
  }
  static uint16_t bf16_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  static void store_bf16(uint16_t* p, const V& a) { PL_EACH p[i] = bf16_of(a.v[i]); }
  static V round_bf16(const V& a) {
    V r;
    PL_EACH {
      uint32_t u = uint32_t(bf16_of(a.v[i])) << 16;
      memcpy(&r.v[i], &u, 4);
    }
    return r;
  }
  // lanes outside [lo, hi) become fill
  static V keep(const V& a, int lo, int hi, float fill) {
    V r;
    PL_EACH r.v[i] = (i >= lo && i < hi) ? a.v[i] : fill;
    return r;
  }
  // nearest integer of x for |x| < 2^22, ties to even, without a libm call
  static V nearest(const V& x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23
    V r;
    PL_EACH {
      volatile float t = x.v[i] + magic;
      r.v[i] = t - magic;
    }
    return r;
  }
  static V ldexp_int(const V& p, const V& n) {  // p * 2^n, n an integer in [-127, 127]
    V r;
    PL_EACH {
      int32_t e = (int32_t(n.v[i]) + 127) << 23;
      float f;
      memcpy(&f, &e, 4);
      r.v[i] = p.v[i] * f;
    }
    return r;
  }
  static V zero_below(const V& r, const V& x, float limit) {
    V o;
    PL_EACH o.v[i] = x.v[i] < limit ? 0.0f : r.v[i];
    return o;
  }
  static V min(const V& a, const V& b) {
    V r;
    PL_EACH r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return r;
  }
  static void store_int8(int8_t* p, const V& a) { PL_EACH p[i] = int8_t(a.v[i] == a.v[i] ? int(a.v[i]) : 0); }
  static V load_int8(const int8_t* p) {
    V r;
    PL_EACH r.v[i] = float(p[i]);
    return r;
  }
  // Dot products of bytes that are stored with an offset of 128 with four int8 values, whose sum `quads_start` is told.
  static I quads_start(int32_t) { return I{}; }
  static Quads load_quads(const uint8_t* p) {
    Quads r;
    for (int i = 0; i < 64; ++i) r.v[i] = int8_t(p[i] ^ 0x80);
    return r;
  }
  static I dot_quads(const I& acc, const Quads& k, int32_t four) {
    int8_t q[4];
    memcpy(q, &four, 4);
    I r;
    PL_EACH r.v[i] =
        acc.v[i] + k.v[4 * i] * q[0] + k.v[4 * i + 1] * q[1] + k.v[4 * i + 2] * q[2] + k.v[4 * i + 3] * q[3];
    return r;
  }
  static V to_float(const I& a) {
    V r;
    PL_EACH r.v[i] = float(a.v[i]);
    return r;
  }
  static float lane_sum(V x) {
    for (int step = 8; step > 0; step >>= 1)
      for (int i = 0; i < step; ++i) x.v[i] += x.v[i + step];
    return x.v[0];
  }
  static float lane_max(const V& x) {
    float m = x.v[0];
    for (int i = 1; i < 16; ++i) m = x.v[i] > m ? x.v[i] : m;
    return m;
  }
  static void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }  // second-level cache
  static void prefetch(const void* p) { __builtin_prefetch(p); }
};
#undef PL_EACH

}  // namespace
