// Functions of sixteen-lane vectors that the kernels share; to be included behind a simd_*.h.
#pragma once
#include "kernels.h"

namespace {

using paceline::Act;

inline float lane_sum(V x) { return S::lane_sum(x); }
inline float lane_max(V x) { return S::lane_max(x); }

// e^x, relative error below 2e-7; exactly 0 below -87 (the polynomial of Cephes' expf).
inline V exp_v(V x) {
  const V c = S::min(S::max(x, S::set1(-87.0f)), S::set1(88.0f));
  const V n = S::nearest(S::mul(c, S::set1(1.44269504088896341f)));
  V r = S::fma(n, S::set1(-0.693359375f), c);
  r = S::fma(n, S::set1(2.12194440e-4f), r);
  V p = S::set1(1.9875691500e-4f);
  p = S::fma(p, r, S::set1(1.3981999507e-3f));
  p = S::fma(p, r, S::set1(8.3334519073e-3f));
  p = S::fma(p, r, S::set1(4.1665795894e-2f));
  p = S::fma(p, r, S::set1(1.6666665459e-1f));
  p = S::fma(p, r, S::set1(5.0000001201e-1f));
  p = S::fma(p, S::mul(r, r), S::add(r, S::set1(1.0f)));
  return S::zero_below(S::ldexp_int(p, n), x, -87.0f);
}

inline V silu_v(V x) { return S::quotient(x, S::add(S::set1(1.0f), exp_v(S::sub(S::zero(), x)))); }

inline V tanh_v(V x) {  // 1 - 2 / (e^2x + 1)
  const V e = exp_v(S::add(x, x));
  return S::sub(S::set1(1.0f), S::div(S::set1(2.0f), S::add(e, S::set1(1.0f))));
}

inline V sigmoid_v(V x) { return S::div(S::set1(1.0f), S::add(S::set1(1.0f), exp_v(S::sub(S::zero(), x)))); }

inline V gelu_tanh_v(V x) {
  const V inner = S::mul(S::set1(0.7978845608028654f), S::fma(S::mul(S::set1(0.044715f), S::mul(x, x)), x, x));
  return S::mul(S::mul(S::set1(0.5f), x), S::add(S::set1(1.0f), tanh_v(inner)));
}

inline void store_act(void* base, size_t index, Act act, V x) {
  if (act == Act::kBF16)
    S::store_bf16(static_cast<uint16_t*>(base) + index, x);
  else
    S::store(static_cast<float*>(base) + index, act == Act::kF32Rounded ? S::round_bf16(x) : x);
}

inline V load_act(const void* base, size_t index, Act act) {
  return act == Act::kBF16 ? S::load_bf16(static_cast<const uint16_t*>(base) + index)
                           : S::load(static_cast<const float*>(base) + index);
}

// The first n of sixteen values; the others are 0.
inline V load_part(const float* p, int n) {
  if (n >= 16) return S::load(p);
  float t[16] = {0};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return S::load(t);
}

inline void store_part(float* p, V x, int n) {
  if (n >= 16) return S::store(p, x);
  float t[16];
  S::store(t, x);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}

inline void store_act_part(void* base, size_t index, Act act, V x, int n) {
  if (n >= 16) return store_act(base, index, act, x);
  if (act == Act::kBF16) {
    uint16_t t[16];
    S::store_bf16(t, x);
    for (int i = 0; i < n; ++i) static_cast<uint16_t*>(base)[index + i] = t[i];
  } else {
    store_part(static_cast<float*>(base) + index, act == Act::kF32Rounded ? S::round_bf16(x) : x, n);
  }
}

}  // namespace
