// One row of logits -> one token, a distribution, or log-probabilities. Everything here is scalar and portable except
// the kernels it calls, and no result depends on any other row.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling_kernels.h"
#include "sampling_math.h"

namespace paceline::sampling {

// The filters of one request, in the order in which they apply (the order of vLLM's sampler): temperature, min-p,
// top-k, top-p. temperature 0 is argmax and ignores the filters, which never remove the largest logit.
struct Warp {
  double temperature = 1.0;
  int64_t top_k = 0;   // <= 0: off
  double top_p = 1.0;  // >= 1: off
  double min_p = 0.0;  // 0: off
};

// Logits of one row, readable in whole blocks of 64 (the last one padded with -inf) with the maximum of each block.
class RowView {
 public:
  // x: n values that outlive the view. token_ids: the target ids of the row's columns, strictly increasing, or null
  // when column = token id. +inf counts as the largest finite float, so that several of them share the mass.
  void reset(const float* x, int n, const int32_t* token_ids);

  int size() const { return n_; }
  int blocks() const { return static_cast<int>(maxima_.size()); }
  const float* block(int b) const { return (b + 1) * kBlock <= n_ ? x_ + b * kBlock : tail_; }
  float block_max(int b) const { return maxima_[static_cast<size_t>(b)]; }
  const std::vector<float>& maxima() const { return maxima_; }
  float max() const { return max_; }
  bool empty() const;  // nothing above -inf
  float at(int column) const { return x_[column]; }
  uint32_t token(int column) const {
    return static_cast<uint32_t>(token_ids_ == nullptr ? column : token_ids_[column]);
  }
  // Whole blocks that lie in memory one after the other, starting at block(0); a padded block may follow.
  int whole_blocks() const { return n_ / kBlock; }
  const int32_t* token_ids() const { return token_ids_; }
  // Lowest column with the largest value; of a row without any: the lowest column that holds -inf, else 0.
  int argmax() const;

 private:
  const float* x_ = nullptr;
  const int32_t* token_ids_ = nullptr;
  int n_ = 0;
  float max_ = 0;
  std::vector<float> maxima_;
  std::vector<float> clamped_;  // copy of a row that holds +inf
  alignas(64) float tail_[kBlock];
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
