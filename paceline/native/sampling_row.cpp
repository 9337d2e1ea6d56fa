#include "sampling_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace paceline::sampling {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();

// Order of floats as order of unsigned integers; -0 equals +0.
uint32_t order_key(float x) {
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// fp32 factor for vector code. Clamped: 0 * inf must not appear at a temperature of 1e-300.
float scale_of(double temperature) { return static_cast<float>(std::min(1.0 / temperature, 1e30)); }

double sum_lanes(const double* lanes) {
  double sum = 0;
  for (int l = 0; l < 16; ++l) sum += lanes[l];
  return sum;
}

// sum_i exp((x_i - max) * scale) over the whole row.
double total_weight(const RowView& row, float scale) {
  const Kernels& k = kernels();
  const int whole = row.whole_blocks();
  double lanes[16] = {};
  k.sum_exp(row.block(0), row.maxima().data(), whole, row.max(), scale, lanes);
  if (whole < row.blocks())
    k.sum_exp(row.block(whole), &row.maxima()[static_cast<size_t>(whole)], 1, row.max(), scale, lanes);
  return sum_lanes(lanes);
}

// Appends every column with a value >= threshold (> -inf) in increasing order.
void collect(const RowView& row, float threshold, Survivors& out) {
  const Kernels& k = kernels();
  threshold = std::max(threshold, kLowest);
  out.columns.clear();
  out.logits.clear();
  for (int b = 0; b < row.blocks(); ++b) {
    if (!(row.block_max(b) >= threshold)) continue;
    const float* x = row.block(b);
    for (uint64_t mask = k.mask_ge(x, threshold); mask != 0; mask &= mask - 1) {
      const int i = __builtin_ctzll(mask);
      out.columns.push_back(b * kBlock + i);
      out.logits.push_back(x[i]);
    }
  }
}

void fill_weights(const RowView& row, float scale, Survivors& s) {
  const Kernels& k = kernels();
  const size_t n = s.logits.size();
  s.weights.resize(n);
  size_t i = 0;
  for (; i + kBlock <= n; i += kBlock) k.exp_block(&s.logits[i], row.max(), scale, &s.weights[i]);
  if (i < n) {
    float in[kBlock], out[kBlock];
    std::fill(in, in + kBlock, kNegInf);
    std::copy(s.logits.begin() + static_cast<long>(i), s.logits.end(), in);
    k.exp_block(in, row.max(), scale, out);
    std::copy(out, out + (n - i), s.weights.begin() + static_cast<long>(i));
  }
}

// Keeps the elements that come first in the order (logit descending, id ascending) while the measure of those before is
// below `limit`; an element's measure is its weight, or 1. At least one is kept. The elements are counted into buckets;
// those above the boundary bucket are kept, the boundary bucket itself is split further: first by linear buckets
// between the extremes, then by the bits of the logit. What few elements remain are sorted.
class PrefixSelection {
 public:
  void apply(Survivors& s, double limit, bool weighted) {
    const int n = static_cast<int>(s.columns.size());
    kept_.assign(static_cast<size_t>(n), 0);
    active_.resize(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) active_[static_cast<size_t>(i)] = i;
    before_ = 0;

    const auto [low, high] = std::minmax_element(s.logits.begin(), s.logits.end());
    const int last = std::clamp(n / 8, 8, 2048) - 1;
    const float lowest = *low, scale = static_cast<float>(last) / (*high - lowest);
    if (scale > 0 && scale < kInf)
      split(s, limit, weighted, last, [&](float x) { return std::min(static_cast<int>((x - lowest) * scale), last); });
    split(s, limit, weighted, 0x7FF, [](float x) { return static_cast<int>(order_key(x) >> 21); });
    split(s, limit, weighted, 0x7FF, [](float x) { return static_cast<int>(order_key(x) >> 10 & 0x7FF); });
    split(s, limit, weighted, 0x3FF, [](float x) { return static_cast<int>(order_key(x) & 0x3FF); });
    if (active_.size() <= kFew)  // else they are equal, and in order of ids already
      std::sort(active_.begin(), active_.end(), [&s](int a, int b) {
        const float x = s.logits[static_cast<size_t>(a)], y = s.logits[static_cast<size_t>(b)];
        return x > y || (x == y && a < b);
      });
    for (int i : active_) {
      if (before_ >= limit && before_ > 0) break;
      kept_[static_cast<size_t>(i)] = 1;
      before_ += measure(s, i, weighted);
    }

    size_t m = 0;
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      if (!kept_[i]) continue;
      s.columns[m] = s.columns[i];
      s.logits[m] = s.logits[i];
      if (!s.weights.empty()) s.weights[m] = s.weights[i];
      ++m;
    }
    s.columns.resize(m);
    s.logits.resize(m);
    if (!s.weights.empty()) s.weights.resize(m);
  }

 private:
  static constexpr size_t kFew = 64;
  static constexpr float kInf = std::numeric_limits<float>::infinity();
  std::vector<uint8_t> kept_;
  std::vector<int32_t> active_;    // undecided elements, by id
  std::vector<uint16_t> buckets_;  // of the undecided elements
  std::vector<double> histogram_;
  double before_ = 0;  // measure of everything above the undecided elements

  static double measure(const Survivors& s, int i, bool weighted) {
    return weighted ? static_cast<double>(s.weights[static_cast<size_t>(i)]) : 1.0;
  }

  template <class Bucket>
  void split(const Survivors& s, double limit, bool weighted, int last, Bucket&& bucket) {
    if (active_.size() <= kFew) return;
    buckets_.resize(active_.size());
    histogram_.assign(static_cast<size_t>(last) + 1, 0.0);
    for (size_t a = 0; a < active_.size(); ++a)
      buckets_[a] = static_cast<uint16_t>(bucket(s.logits[static_cast<size_t>(active_[a])]));
    for (size_t a = 0; a < active_.size(); ++a) histogram_[buckets_[a]] += measure(s, active_[a], weighted);
    int boundary = last;
    while (boundary >= 0 && before_ + histogram_[static_cast<size_t>(boundary)] < limit)
      before_ += histogram_[static_cast<size_t>(boundary--)];
    size_t remaining = 0;
    for (size_t a = 0; a < active_.size(); ++a) {
      const int i = active_[a];
      kept_[static_cast<size_t>(i)] = buckets_[a] > boundary;
      active_[remaining] = i;
      remaining += buckets_[a] == boundary;
    }
    active_.resize(remaining);
  }
};

void keep_prefix(Survivors& s, double limit, bool weighted) {
  static thread_local PrefixSelection selection;
  selection.apply(s, limit, weighted);
}

// A value that at least min(k, finite values) elements reach: the k-th largest block maximum.
float kth_block_max(const RowView& row, int64_t k) {
  if (k > row.blocks()) return kNegInf;
  static thread_local std::vector<float> maxima;
  maxima = row.maxima();
  std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
  return maxima[static_cast<size_t>(k - 1)];
}

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
    for (int i = 0; i < n; ++i) clamped_[static_cast<size_t>(i)] = x[i] > -kLowest ? -kLowest : x[i];
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

void survive(const RowView& row, const Warp& warp, Survivors& out) {
  const float scale = scale_of(warp.temperature);
  const double top = row.max();
  out.all = true;
  out.weights.clear();
  if (warp.min_p > 0) {
    const double cut =
        portable_log(std::clamp(warp.min_p, 1e-300, 1.0));  // p_i >= min_p p_max  <=>  (l_i - max) / T >= log min_p
    const double lowest = top + cut * warp.temperature;
    // A little lower for the collection; the test itself is made in double.
    collect(row, static_cast<float>(lowest - 1e-5 * (std::fabs(lowest) + std::fabs(top)) - 1e-30), out);
    size_t m = 0;
    for (size_t i = 0; i < out.columns.size(); ++i) {
      if ((static_cast<double>(out.logits[i]) - top) / warp.temperature < cut) continue;
      out.columns[m] = out.columns[i];
      out.logits[m++] = out.logits[i];
    }
    out.columns.resize(m);
    out.logits.resize(m);
    out.all = false;
  }
  if (warp.top_k > 0 && warp.top_k < row.size()) {
    if (out.all) collect(row, kth_block_max(row, warp.top_k), out);
    out.all = false;
    if (warp.top_k < static_cast<int64_t>(out.columns.size())) keep_prefix(out, static_cast<double>(warp.top_k), false);
  }
  if (warp.top_p < 1) {
    double total = 0;
    if (out.all) {
      total = total_weight(row, scale);
      out.all = false;
      // An upper set of the order that holds top_p of the mass holds the prefix looked for. A few hundred ids usually
      // do; for certain, ids lighter than (1 - top_p) total / n weigh less than 1 - top_p together.
      double collected = 0;
      for (double parts : {1000.0, static_cast<double>(row.size())}) {
        const double lightest = std::max(0.99 * (1 - warp.top_p) * total / parts, 1e-300);
        const double threshold = top + warp.temperature * (portable_log(lightest) - 1e-3) - 1e-5 * std::fabs(top);
        collect(row, static_cast<float>(std::max(threshold, static_cast<double>(kLowest))), out);
        fill_weights(row, scale, out);
        collected = 0;
        for (float w : out.weights) collected += w;
        if (collected >= warp.top_p * total) break;
      }
    } else {
      fill_weights(row, scale, out);
      for (float w : out.weights) total += w;
    }
    keep_prefix(out, warp.top_p * total, true);
  }
}

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
    best.weights.clear();
    collect(row, kth_block_max(row, top_n), best);
    if (static_cast<int>(best.columns.size()) > top_n) keep_prefix(best, top_n, false);
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
