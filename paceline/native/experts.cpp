#include "experts.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

void route(const float* logits, int experts, int top_k, bool normalise, int* ids, float* weights) {
  float top = logits[0], total = 0;
  for (int e = 1; e < experts; ++e) top = std::max(top, logits[e]);
  for (int e = 0; e < experts; ++e) total += std::exp(logits[e] - top);
  float chosen = 0;
  for (int j = 0; j < top_k; ++j) {
    int best = -1;
    for (int e = 0; e < experts; ++e) {
      if (std::find(ids, ids + j, e) != ids + j) continue;
      if (best < 0 || logits[e] > logits[best]) best = e;  // not a number: whoever is first, and the sum shows it
    }
    ids[j] = best;
    weights[j] = std::exp(logits[best] - top) / total;
    chosen += weights[j];
  }
  if (normalise)
    for (int j = 0; j < top_k; ++j) weights[j] /= chosen;
  for (int j = 1; j < top_k; ++j)
    for (int i = j; i > 0 && ids[i] < ids[i - 1]; --i) {
      std::swap(ids[i], ids[i - 1]);
      std::swap(weights[i], weights[i - 1]);
    }
}

void sort_by_expert(const int* ids, int rows, int top_k, int experts, int* starts, int* place) {
  const int n = rows * top_k;
  std::fill(starts, starts + experts + 1, 0);
  for (int i = 0; i < n; ++i) ++starts[ids[i] + 1];
  for (int e = 0; e < experts; ++e) starts[e + 1] += starts[e];
  for (int i = 0; i < n; ++i) place[i] = starts[ids[i]]++;
  for (int e = experts; e > 0; --e) starts[e] = starts[e - 1];
  starts[0] = 0;
}

void ExpertScratch::reserve(const ExpertWeights& w, int max_rows) {
  places = std::max(places, size_t(max_rows) * size_t(w.top_k));
  experts = std::max(experts, int(w.gate_up.size()));
  hidden_stride = std::max(hidden_stride, round_up(size_t(w.hidden()), 32));
  inner_stride = std::max(inner_stride, round_up(size_t(w.inner()), 32));
  if (w.quantised()) {
    hidden_groups = std::max(hidden_groups, size_t(quant_groups(w.hidden())));
    inner_groups = std::max(inner_groups, size_t(quant_groups(w.inner())));
  }
}

void ExpertScratch::allocate(size_t act_item) {
  if (gathered) return;
  gathered = std::make_unique<Region>(places * hidden_stride * act_item);
  inner = std::make_unique<Region>(places * inner_stride * act_item);
  out = std::make_unique<Region>(places * hidden_stride * sizeof(float));
  if (hidden_groups) {
    const size_t padded = places + size_t(experts) * (kMaxQuantRows - 1);
    hidden_records = std::make_unique<Region>(padded * hidden_groups * sizeof(QuantGroup));
    inner_records = std::make_unique<Region>(padded * inner_groups * sizeof(QuantGroup));
  }
  ids.resize(places);
  place.resize(places);
  weights.resize(places);
  starts.resize(size_t(experts) + 1);
}

size_t ExpertScratch::bytes() const {
  return places * (hidden_stride * 8 + inner_stride * 4 + (hidden_groups + inner_groups) * sizeof(QuantGroup));
}

}  // namespace paceline
