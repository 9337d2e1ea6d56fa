// Which ids of a row survive a request's filters.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling_row.h"

namespace paceline::sampling {

// The filters of one request, in the order in which they apply (the order of vLLM's sampler): temperature, min-p,
// top-k, top-p. temperature 0 is argmax and ignores the filters, which never remove the largest logit.
struct Warp {
  double temperature = 1.0;
  int64_t top_k = 0;   // <= 0: off
  double top_p = 1.0;  // >= 1: off
  double min_p = 0.0;  // 0: off
};

// The ids that survive a warp, in increasing order. `all` stands for every column.
struct Survivors {
  bool all = false;
  std::vector<int32_t> columns;
  std::vector<float> logits;
  std::vector<float> weights;  // exp((logit - max) / temperature); filled where a filter or a caller needs it
};

// Applies the filters of `warp` (temperature > 0) to a row that is not empty.
void survive(const RowView& row, const Warp& warp, Survivors& out);

// The best `count` ids of a row (ties: lowest ids), in increasing order of ids; -inf never counts.
void best_of(const RowView& row, int64_t count, Survivors& out);

// 1 / temperature in fp32 for vector code. Clamped: 0 * inf must not appear at a temperature of 1e-300.
float scale_of(double temperature);

// sum_i exp((x_i - max) * scale) over the whole row.
double total_weight(const RowView& row, float scale);

// Survivors' weights from their logits.
void fill_weights(const RowView& row, float scale, Survivors& s);

}  // namespace paceline::sampling
