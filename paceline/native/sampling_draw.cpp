#include "sampling_draw.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace paceline::sampling {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// Keeps the best of the scores seen; the score itself is evaluated in double, in this one place.
struct Best {
  const RowView& row;
  double top;  // the row's maximum
  double temperature;
  double score = -std::numeric_limits<double>::infinity();
  int column = -1;

  Best(const RowView& r, double t) : row(r), top(r.max()), temperature(t) {}

  void offer(int c, float logit, uint32_t word) {
    const double value = (static_cast<double>(logit) - top) / temperature + gumbel(word);
    if (value > score || (value == score && c < column)) {
      score = value;
      column = c;
    }
  }
  // What the fp32 upper bound of a score must reach; the slack covers its rounding.
  float threshold() const { return static_cast<float>(score - 1e-3 - 1e-6 * std::fabs(score)); }
};

void search_all(const RowView& row, float scale, const NoiseKey& key, Best& best) {
  const Kernels& k = kernels();
  uint32_t words[kBlock];
  const int top = row.argmax();  // its score rules most others out
  best.offer(top, row.at(top), noise_bits(key, row.token(top)));
  const auto offer = [&](int b, uint64_t mask) {
    const float* x = row.block(b);
    for (; mask != 0; mask &= mask - 1) {
      const int i = __builtin_ctzll(mask);
      best.offer(b * kBlock + i, x[i], words[i]);
    }
  };
  int b = 0;
  if (row.token_ids() == nullptr) {
    const int whole = row.whole_blocks();
    for (uint64_t mask = 0; b < whole; ++b) {
      b = k.scan_noise(row.block(0), row.maxima().data(), b, whole, key, row.max(), scale, best.threshold(), words,
                       &mask);
      if (b == whole) break;
      offer(b, mask);
    }
  }
  int32_t ids[kBlock];
  for (; b < row.blocks(); ++b) {
    if (!((row.block_max(b) - row.max()) * scale + static_cast<float>(kMaxGumbel) >= best.threshold())) continue;
    const int32_t* listed = row.token_ids() == nullptr ? nullptr : row.token_ids() + b * kBlock;
    if (listed == nullptr || b == row.whole_blocks()) {  // padded: repeat the last id, whose logit there is -inf
      for (int i = 0; i < kBlock; ++i)
        ids[i] = static_cast<int32_t>(row.token(std::min(b * kBlock + i, row.size() - 1)));
      listed = ids;
    }
    k.noise_ids(listed, key, words);
    offer(b, k.bound_mask(row.block(b), words, row.max(), scale, best.threshold()));
  }
}

void search_listed(const RowView& row, const Survivors& s, float scale, const NoiseKey& key, Best& best) {
  const Kernels& k = kernels();
  const int n = static_cast<int>(s.columns.size());
  int32_t ids[kBlock];
  float x[kBlock];
  uint32_t words[kBlock];
  const int top = static_cast<int>(std::max_element(s.logits.begin(), s.logits.end()) - s.logits.begin());
  best.offer(s.columns[static_cast<size_t>(top)], s.logits[static_cast<size_t>(top)],
             noise_bits(key, row.token(s.columns[static_cast<size_t>(top)])));
  for (int i = 0; i < n; i += kBlock) {
    const int count = std::min(kBlock, n - i);
    for (int j = 0; j < kBlock; ++j) {
      const size_t at = static_cast<size_t>(i + std::min(j, count - 1));
      ids[j] = static_cast<int32_t>(row.token(s.columns[at]));
      x[j] = j < count ? s.logits[at] : kNegInf;
    }
    k.noise_ids(ids, key, words);
    for (uint64_t mask = k.bound_mask(x, words, row.max(), scale, best.threshold()); mask != 0; mask &= mask - 1) {
      const int j = __builtin_ctzll(mask);
      if (j < count) best.offer(s.columns[static_cast<size_t>(i + j)], x[j], words[j]);
    }
  }
}

}  // namespace

int draw_coupled(const RowView& row, const Warp& warp, const NoiseKey& key) {
  if (warp.temperature <= 0 || row.empty()) return row.argmax();
  static thread_local Survivors survivors;
  survive(row, warp, survivors);
  Best best(row, warp.temperature);
  const float scale = scale_of(warp.temperature);
  if (survivors.all)
    search_all(row, scale, key, best);
  else
    search_listed(row, survivors, scale, key, best);
  return best.column;
}

Distribution::Distribution(const RowView& row, const Warp& warp) : row_(row) {
  if (warp.temperature <= 0 || row.empty()) {
    certain_ = row.argmax();
    return;
  }
  scale_ = scale_of(warp.temperature);
  survive(row, warp, survivors_);
  if (survivors_.all) {
    total_ = total_weight(row, scale_);
  } else {
    fill_weights(row, scale_, survivors_);
    for (float w : survivors_.weights) total_ += w;
  }
}

float Distribution::at(int column) const {
  if (certain_ >= 0) return column == certain_ ? 1.0f : 0.0f;
  if (survivors_.all) {
    float weights[kBlock];
    kernels().exp_block(row_.block(column / kBlock), row_.max(), scale_, weights);
    return static_cast<float>(weights[column % kBlock] / total_);
  }
  const auto found = std::lower_bound(survivors_.columns.begin(), survivors_.columns.end(), column);
  if (found == survivors_.columns.end() || *found != column) return 0.0f;
  return static_cast<float>(survivors_.weights[static_cast<size_t>(found - survivors_.columns.begin())] / total_);
}

void Distribution::write(float* probs) const {
  const int n = row_.size();
  if (certain_ < 0 && survivors_.all) {
    float weights[kBlock];
    for (int b = 0; b < row_.blocks(); ++b) {
      kernels().exp_block(row_.block(b), row_.max(), scale_, weights);
      const int count = std::min(kBlock, n - b * kBlock);
      for (int i = 0; i < count; ++i) probs[b * kBlock + i] = static_cast<float>(weights[i] / total_);
    }
    return;
  }
  std::fill(probs, probs + n, 0.0f);
  if (certain_ >= 0) probs[certain_] = 1.0f;
  for (size_t i = 0; i < survivors_.columns.size(); ++i)
    probs[survivors_.columns[i]] = static_cast<float>(survivors_.weights[i] / total_);
}

double DraftDistribution::at(int64_t token) const {
  if (probs == nullptr) return 1.0;
  if (ids == nullptr) return token < count ? probs[token] : 0.0;
  double sum = 0;
  for (int i = 0; i < count; ++i)
    if (ids[i] == token) sum += probs[i];
  return sum;
}

bool accept_draft(float target_prob, const DraftDistribution& q, int64_t draft, double u) {
  return u * q.at(draft) < static_cast<double>(target_prob);
}

void subtract_residual(float* target_probs, int n, const DraftDistribution& q, int64_t draft) {
  static thread_local std::vector<float> residual;
  residual.assign(target_probs, target_probs + n);
  if (q.probs == nullptr) {
    residual[static_cast<size_t>(draft)] = 0.0f;
  } else if (q.ids == nullptr) {
    for (int i = 0; i < std::min(n, q.count); ++i) residual[static_cast<size_t>(i)] -= q.probs[i];
  } else {
    for (int i = 0; i < q.count; ++i) residual[static_cast<size_t>(q.ids[i])] -= q.probs[i];
  }
  double total = 0;
  for (float& r : residual) {
    r = r > 0 ? r : 0.0f;
    total += r;
  }
  if (!(total > 0)) return;
  for (int i = 0; i < n; ++i) target_probs[i] = static_cast<float>(residual[static_cast<size_t>(i)] / total);
}

int draw_inverse_cdf(const float* probs, int n, double u) {
  static thread_local std::vector<double> sums;  // of blocks, so that few additions depend on one another
  sums.clear();
  double total = 0;
  for (int begin = 0; begin < n; begin += kBlock) {
    const int end = std::min(n, begin + kBlock);
    double lanes[4] = {};
    int i = begin;
    for (; i + 4 <= end; i += 4)
      for (int l = 0; l < 4; ++l) lanes[l] += static_cast<double>(probs[i + l]);
    for (; i < end; ++i) lanes[0] += static_cast<double>(probs[i]);
    sums.push_back((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
    total += sums.back();
  }
  const double target = u * total;
  double before = 0;
  int last = 0;
  for (size_t b = 0; b < sums.size(); before += sums[b++]) {
    if (!(sums[b] > 0)) continue;
    double within = before;
    const int begin = static_cast<int>(b) * kBlock;
    const bool inside = target < before + sums[b];
    if (!inside && b + 1 < sums.size()) {
      // Remember the last possible id, in case rounding puts the target beyond everything.
      for (int i = begin; i < std::min(n, begin + kBlock); ++i) last = probs[i] > 0 ? i : last;
      continue;
    }
    for (int i = begin; i < std::min(n, begin + kBlock); ++i) {
      if (!(probs[i] > 0)) continue;
      within += static_cast<double>(probs[i]);
      last = i;
      if (target < within) return i;
    }
    if (inside) return last;
  }
  return last;
}

TokenLogprob logprob(const RowView& row, int64_t id, int top_n, std::vector<TokenLogprob>& top) {
  top.clear();
  const double log_total = row.empty() ? 0.0 : portable_log(total_weight(row, 1.0f));
  const auto value = [&](float x) {
    if (row.empty()) return std::numeric_limits<float>::quiet_NaN();
    return static_cast<float>((static_cast<double>(x) - static_cast<double>(row.max())) - log_total);
  };
  const float chosen = row.at(static_cast<int>(id));
  int rank = 1;
  const Kernels& k = kernels();
  for (int b = 0; b < row.blocks(); ++b) {
    if (!(row.block_max(b) >= chosen)) continue;
    const float* x = row.block(b);
    for (uint64_t mask = k.mask_ge(x, chosen); mask != 0; mask &= mask - 1) {
      const int i = __builtin_ctzll(mask);
      if (x[i] > chosen || b * kBlock + i < id) ++rank;
    }
  }
  if (top_n > 0 && !row.empty()) {
    static thread_local Survivors best;
    best_of(row, top_n, best);
    for (size_t i = 0; i < best.columns.size(); ++i) top.push_back({best.columns[i], best.logits[i], 0});
    std::stable_sort(top.begin(), top.end(),
                     [](const TokenLogprob& a, const TokenLogprob& b) { return a.logprob > b.logprob; });
    for (size_t i = 0; i < top.size(); ++i) {
      top[i].logprob = value(top[i].logprob);
      top[i].rank = static_cast<int>(i) + 1;
    }
  }
  return {id, value(chosen), rank};
}

}  // namespace paceline::sampling
