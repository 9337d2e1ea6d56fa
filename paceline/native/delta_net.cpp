#include "delta_net.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace paceline {

extern const DeltaKernels kPortableDelta;
#if defined(__x86_64__)
extern const DeltaKernels kAvx2Delta;
extern const DeltaKernels kAvx512Delta;
#endif

const DeltaKernels& delta_kernels_for(const char* path) {
#if defined(__x86_64__)
  const std::string name = path;
  if (name == "avx2") return kAvx2Delta;
  if (name != "portable") return kAvx512Delta;
#endif
  return kPortableDelta;
}

namespace {

constexpr int kMaxCopies = 8;

// The heads that fall to a thread, for all sequences: threads are then equally busy however rows are spread.
struct Heads {
  int begin, end;
};
Heads heads_of(int heads, int tid, int threads) {
  return {int(int64_t(heads) * tid / threads), int(int64_t(heads) * (tid + 1) / threads)};
}

float sigmoid(float x) { return float(1.0 / (1.0 + std::exp(-double(x)))); }

double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace

void run_short_conv(const DeltaKernels& kernels, const DeltaLayer& l, const StateBatch& b, const DeltaRows& r, int tid,
                    int threads) {
  const StateCache& cache = *b.cache;
  const DeltaShape& shape = cache.shape();
  const int keys = 2 * shape.key_heads;
  const Heads mine = heads_of(keys + shape.value_heads, tid, threads);
  for (int h = mine.begin; h < mine.end; ++h)
    for (int s = 0; s < b.sequences; ++s) {
      const int start = b.starts[s], rows = b.starts[s + 1] - start;
      const int first = h < keys ? h * shape.key_dim : 2 * shape.keys() + (h - keys) * shape.value_dim;
      float* history = cache.history(b.slots[s], l.layer);
      ShortConvArgs a{};
      a.rows = rows;
      a.width = h < keys ? shape.key_dim : shape.value_dim;
      a.kernel = shape.kernel;
      a.x = r.mixed + size_t(start) * r.ld_mixed + first;
      a.ld_x = r.ld_mixed;
      a.history = history + first;
      a.weight = l.conv + first;
      a.ld_history = size_t(shape.channels());
      a.scale = h < shape.key_heads ? float(1.0 / std::sqrt(double(shape.key_dim))) : h < keys ? 1.0f : 0.0f;
      a.out = r.rows + size_t(start) * r.ld_rows + first;
      a.ld_out = r.ld_rows;
      kernels.short_conv(a);
      for (int i = 0; i < b.num_snapshots; ++i)
        if (b.snapshots[i].sequence == s)
          cache.advance_history(cache.history(b.snapshots[i].slot, l.layer), history, a.x, a.ld_x, b.snapshots[i].rows,
                                first, a.width);
      if (b.journal[s] < 0) {
        cache.advance_history(history, history, a.x, a.ld_x, rows, first, a.width);
        continue;
      }
      for (int i = 0; i < rows; ++i) {
        float* to = cache.journal(l.layer, b.journal[s] + i);
        std::memcpy(to + first, a.x + size_t(i) * a.ld_x, size_t(a.width) * 4);
        if (h >= shape.key_heads)  // queries are not repeated
          std::memcpy(to + shape.channels() + first - shape.keys(), a.out + size_t(i) * a.ld_out, size_t(a.width) * 4);
      }
    }
}

void run_delta_rule(const DeltaKernels& kernels, const DeltaLayer& l, const StateBatch& b, const DeltaRows& r, int tid,
                    int threads) {
  const StateCache& cache = *b.cache;
  const DeltaShape& shape = cache.shape();
  const int heads = shape.value_heads, channels = shape.channels(), values = shape.values();
  const int journal_gates = channels + shape.keys() + values;
  const Heads mine = heads_of(heads, tid, threads);
  for (int h = mine.begin; h < mine.end; ++h)
    for (int s = 0; s < b.sequences; ++s) {
      const int start = b.starts[s], rows = b.starts[s + 1] - start;
      float* mixed = r.mixed + size_t(start) * r.ld_mixed;
      float* beta = mixed + channels + values + h;
      float* decay = beta + heads;
      for (int i = 0; i < rows; ++i) {
        const size_t at = size_t(i) * r.ld_mixed;
        beta[at] = sigmoid(beta[at]);
        decay[at] = float(std::exp(double(l.rate[h]) * softplus(double(decay[at] + l.dt_bias[h]))));
        if (b.journal[s] >= 0) {
          float* to = cache.journal(l.layer, b.journal[s] + i) + journal_gates + h;
          to[0] = decay[at];
          to[heads] = beta[at];
        }
      }
      StateCopy copies[kMaxCopies];
      DeltaRuleArgs a{};
      for (int i = 0; i < b.num_snapshots && a.num_copies < kMaxCopies; ++i)
        if (b.snapshots[i].sequence == s)
          copies[a.num_copies++] = {b.snapshots[i].rows, cache.state(b.snapshots[i].slot, l.layer, h)};
      a.rows = rows;
      a.key_dim = shape.key_dim;
      a.value_dim = shape.value_dim;
      a.q = r.rows + size_t(start) * r.ld_rows + h / (heads / shape.key_heads) * shape.key_dim;
      a.k = a.q + shape.keys();
      a.out = r.rows + size_t(start) * r.ld_rows + 2 * shape.keys() + h * shape.value_dim;
      a.v = a.out;
      a.ld = r.ld_rows;
      a.decay = decay;
      a.beta = beta;
      a.ld_gates = r.ld_mixed;
      a.state = cache.state(b.slots[s], l.layer, h);
      a.keep = b.journal[s] >= 0;
      a.copies = copies;
      kernels.delta_rule(a);
      GatedNormArgs n{};
      n.rows = rows;
      n.width = shape.value_dim;
      n.x = a.out;
      n.ld_x = r.ld_rows;
      n.z = mixed + channels + h * shape.value_dim;
      n.ld_z = r.ld_mixed;
      n.weight = l.norm;
      n.eps = l.eps;
      n.out = static_cast<uint8_t*>(r.out) + size_t(start) * r.ld_out * (r.act == Act::kBF16 ? 2 : 4);
      n.ld_out = r.ld_out;
      n.column = size_t(h) * size_t(shape.value_dim);
      n.act = r.act;
      kernels.gated_norm(n);
    }
}

}  // namespace paceline
