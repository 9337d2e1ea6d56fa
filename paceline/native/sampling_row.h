// One row of logits, as the sampler reads it.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling_kernels.h"

namespace paceline::sampling {

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

// What is drawn where masks leave nothing of a row.
constexpr int64_t kNoToken = -1;
// Whether they leave nothing of it: `row` is `raw` (as many values) behind the masks. Of a row that had nothing above
// -inf to begin with there is nothing to be left: false.
bool exhausted(const RowView& row, const float* raw);

}  // namespace paceline::sampling
