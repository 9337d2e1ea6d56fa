// One row of logits -> one token, a distribution, or log-probabilities. Nothing here depends on any other row.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling_filters.h"
#include "sampling_math.h"
#include "sampling_row.h"

namespace paceline::sampling {

// Coupled draw: the column of argmax over the survivors of (logit - max) / temperature + gumbel; ties: lowest id.
int draw_coupled(const RowView& row, const Warp& warp, const NoiseKey& key);

// The warped distribution of a row; the row must outlive it.
class Distribution {
 public:
  Distribution(const RowView& row, const Warp& warp);
  float at(int column) const;
  void write(float* probs) const;  // dense: probs[row.size()]

 private:
  const RowView& row_;
  int certain_ = -1;  // the only column with mass: greedy, or nothing to choose from
  Survivors survivors_;
  float scale_ = 0;
  double total_ = 0;
};

// A draft row's distribution q: dense over columns (ids null), or over `count` listed token ids; one-hot when probs is
// null.
struct DraftDistribution {
  const float* probs = nullptr;
  const int32_t* ids = nullptr;
  int count = 0;

  double at(int64_t token) const;
};

// Leviathan et al. / Chen et al. (2023): true if the draft is kept, i.e. u * q(draft) < p(draft).
bool accept_draft(float target_prob, const DraftDistribution& q, int64_t draft, double u);
// norm(max(p - q, 0)) in place; leaves p if nothing remains. `draft` is the rejected token (one-hot q).
void subtract_residual(float* target_probs, int n, const DraftDistribution& q, int64_t draft);
// Inverse-CDF draw in order of ids from probabilities that sum to about 1.
int draw_inverse_cdf(const float* probs, int n, double u);

struct TokenLogprob {
  int64_t id;
  float logprob;
  int rank;  // 1 = the argmax; ties rank by id
};

// Raw log-softmax of one row at `id`, and of the `top_n` best ids in order (ties: lowest id first).
TokenLogprob logprob(const RowView& row, int64_t id, int top_n, std::vector<TokenLogprob>& top);

}  // namespace paceline::sampling
