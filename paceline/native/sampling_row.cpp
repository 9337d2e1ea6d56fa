#include "sampling_row.h"

#include <algorithm>
#include <limits>

namespace paceline::sampling {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

}  // namespace

void RowView::reset(const float* x, int n, const int32_t* token_ids) {
  const Kernels& k = kernels();
  x_ = x;
  n_ = n;
  token_ids_ = token_ids;
  const int whole = n / kBlock;
  const int rest = n - whole * kBlock;
  maxima_.resize(static_cast<size_t>(whole + (rest > 0)));
  max_ = k.block_maxima(x, whole, maxima_.data());
  if (rest > 0) {
    std::copy(x + whole * kBlock, x + n, tail_);
    std::fill(tail_ + rest, tail_ + kBlock, kNegInf);
    max_ = std::max(max_, k.block_maxima(tail_, 1, &maxima_.back()));
  }
  if (max_ == std::numeric_limits<float>::infinity()) {
    clamped_.resize(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) clamped_[static_cast<size_t>(i)] = std::min(x[i], kLargest);
    reset(clamped_.data(), n, token_ids);
  }
}

bool RowView::empty() const { return !(max_ > kNegInf); }

int RowView::argmax() const {
  if (empty()) {
    for (int i = 0; i < n_; ++i)
      if (x_[i] == kNegInf) return i;
    return 0;
  }
  const Kernels& k = kernels();
  for (int b = 0; b < blocks(); ++b)
    if (block_max(b) == max_) return b * kBlock + __builtin_ctzll(k.mask_ge(block(b), max_));
  return 0;
}

bool exhausted(const RowView& row, const float* raw) {
  return row.empty() && std::any_of(raw, raw + row.size(), [](float x) { return x > kNegInf; });
}

}  // namespace paceline::sampling
