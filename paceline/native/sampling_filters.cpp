#include "sampling_filters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
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

double sum_lanes(const double* lanes) {
  double sum = 0;
  for (int l = 0; l < 16; ++l) sum += lanes[l];
  return sum;
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

}  // namespace

float scale_of(double temperature) { return static_cast<float>(std::min(1.0 / temperature, 1e30)); }

double total_weight(const RowView& row, float scale) {
  const Kernels& k = kernels();
  const int whole = row.whole_blocks();
  double lanes[16] = {};
  k.sum_exp(row.block(0), row.maxima().data(), whole, row.max(), scale, lanes);
  if (whole < row.blocks())
    k.sum_exp(row.block(whole), &row.maxima()[static_cast<size_t>(whole)], 1, row.max(), scale, lanes);
  return sum_lanes(lanes);
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

void best_of(const RowView& row, int64_t count, Survivors& out) {
  out.weights.clear();
  collect(row, kth_block_max(row, count), out);
  if (count < static_cast<int64_t>(out.columns.size())) keep_prefix(out, static_cast<double>(count), false);
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
    if (out.all)
      best_of(row, warp.top_k, out);
    else if (warp.top_k < static_cast<int64_t>(out.columns.size()))
      keep_prefix(out, static_cast<double>(warp.top_k), false);
    out.all = false;
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

}  // namespace paceline::sampling
