// The kernels of delta_kernels.h over one instruction set's vectors.
//
// A state is walked row by row in every pass, whether it decodes, verifies, reads a prompt or repeats committed rows,
// so that none of them can differ by a bit. Sums over the key dimension are four partial sums, folded in one fixed
// tree.
#include <cstring>

#include "delta_kernels.h"
#include "vector_math.inl"

namespace {

using paceline::DeltaRuleArgs;
using paceline::GatedNormArgs;
using paceline::kMaxKeyDim;
using paceline::kStateLanes;
using paceline::ShortConvArgs;

inline float squares(const float* x, int width) {
  V sum = S::zero();
  for (int i = 0; i < width; i += 16) {
    const V a = load_part(x + i, width - i);
    sum = S::fma(a, a, sum);
  }
  return lane_sum(sum);
}

void short_conv(const ShortConvArgs& p) {
  const int before = p.kernel - 1;
  for (int r = 0; r < p.rows; ++r) {
    float* out = p.out + size_t(r) * p.ld_out;
    for (int c = 0; c < p.width; c += 16) {
      const int left = p.width - c;
      V sum = S::zero();
      for (int t = 0; t < p.kernel; ++t) {
        const int at = r + t - before;
        const float* x = at < 0 ? p.history + size_t(before + at) * p.ld_history : p.x + size_t(at) * p.ld_x;
        sum = S::fma(load_part(p.weight + size_t(t) * p.ld_history + c, left), load_part(x + c, left), sum);
      }
      store_part(out + c, silu_v(sum), left);
    }
    if (p.scale == 0.0f) continue;
    const V length = S::set1(1.0f / __builtin_sqrtf(squares(out, p.width) + 1e-6f)), scale = S::set1(p.scale);
    for (int c = 0; c < p.width; c += 16) {
      const int left = p.width - c;
      store_part(out + c, S::mul(S::mul(load_part(out + c, left), length), scale), left);
    }
  }
}

constexpr int kVectors = kStateLanes / 16;

struct Sums {
  V part[4][kVectors];
  Sums() {
    for (auto& p : part)
      for (V& v : p) v = S::zero();
  }
  V total(int v) const { return S::add(S::add(part[0][v], part[1][v]), S::add(part[2][v], part[3][v])); }
};

// sum = S^T k
inline void recall(const float* state, const float* k, int key_dim, Sums& sum) {
  const auto one = [&](int i, int u) {
    const V x = S::set1(k[i]);
    for (int v = 0; v < kVectors; ++v)
      sum.part[u][v] = S::fma(S::load(state + i * kStateLanes + v * 16), x, sum.part[u][v]);
  };
  int i = 0;
  for (; i + 4 <= key_dim; i += 4) {
    one(i, 0);
    one(i + 1, 1);
    one(i + 2, 2);
    one(i + 3, 3);
  }
  for (int u = 0; i < key_dim; ++i, ++u) one(i, u);
}

// S = decay S + k change^T; sum = S^T q
template <bool kOut>
inline void update(float* state, const float* k, const float* q, int key_dim, V decay, const V* change, Sums& sum) {
  const auto one = [&](int i, int u) {
    const V x = S::set1(k[i]);
    for (int v = 0; v < kVectors; ++v) {
      float* at = state + i * kStateLanes + v * 16;
      const V s = S::fma(x, change[v], S::mul(S::load(at), decay));
      S::store(at, s);
      if constexpr (kOut) sum.part[u][v] = S::fma(s, S::set1(q[i]), sum.part[u][v]);
    }
  };
  int i = 0;
  for (; i + 4 <= key_dim; i += 4) {
    one(i, 0);
    one(i + 1, 1);
    one(i + 2, 2);
    one(i + 3, 3);
  }
  for (int u = 0; i < key_dim; ++i, ++u) one(i, u);
}

template <bool kOut>
void delta_rule_t(const DeltaRuleArgs& p) {
  float scratch[kMaxKeyDim * kStateLanes];
  const size_t size = size_t(p.key_dim) * kStateLanes;
  for (int first = 0; first < p.value_dim; first += kStateLanes) {
    const size_t offset = size_t(first / kStateLanes) * size;
    float* state = p.state + offset;
    if (p.keep) {
      std::memcpy(scratch, state, size * 4);
      state = scratch;
    }
    int copy = 0;
    for (int r = 0; r < p.rows; ++r) {
      const float* k = p.k + size_t(r) * p.ld;
      const V decay = S::set1(p.decay[size_t(r) * p.ld_gates]), beta = S::set1(p.beta[size_t(r) * p.ld_gates]);
      Sums known;
      recall(state, k, p.key_dim, known);
      V change[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const int at = first + v * 16;
        const V value = load_part(p.v + size_t(r) * p.ld + at, p.value_dim - at);
        change[v] = S::mul(S::sub(value, S::mul(decay, known.total(v))), beta);
      }
      Sums out;
      update<kOut>(state, k, kOut ? p.q + size_t(r) * p.ld : nullptr, p.key_dim, decay, change, out);
      if constexpr (kOut)
        for (int v = 0; v < kVectors; ++v) {
          const int at = first + v * 16;
          if (at < p.value_dim) store_part(p.out + size_t(r) * p.ld + at, out.total(v), p.value_dim - at);
        }
      for (; copy < p.num_copies && p.copies[copy].rows == r + 1; ++copy)
        std::memcpy(p.copies[copy].to + offset, state, size * 4);
    }
  }
}

void delta_rule(const DeltaRuleArgs& p) {
  if (p.q)
    delta_rule_t<true>(p);
  else
    delta_rule_t<false>(p);
}

void gated_norm(const GatedNormArgs& p) {
  for (int r = 0; r < p.rows; ++r) {
    const float* x = p.x + size_t(r) * p.ld_x;
    const float* z = p.z + size_t(r) * p.ld_z;
    const V scale = S::set1(1.0f / __builtin_sqrtf(squares(x, p.width) / float(p.width) + p.eps));
    for (int c = 0; c < p.width; c += 16) {
      const int left = p.width - c;
      const V y = S::mul(S::mul(load_part(x + c, left), scale), load_part(p.weight + c, left));
      store_act_part(p.out, size_t(r) * p.ld_out + p.column + size_t(c), p.act,
                     S::mul(y, silu_v(load_part(z + c, left))), left);
    }
  }
}

}  // namespace

namespace paceline {
extern const DeltaKernels PACELINE_DELTA_KERNELS;
const DeltaKernels PACELINE_DELTA_KERNELS = {short_conv, delta_rule, gated_norm};
}  // namespace paceline
