// What a step costs by the rows of its pass, learned from the steps themselves; see speculation/cost_table.py.
//
// A step is observed behind a pass that has left nothing of the interpreter in the caches: on arrays in Python one
// observation takes forty microseconds there, here two. Sums are in the order of the formulas.
#include "cost_curve.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;

void register_cost_curve(nb::module_& m);

namespace paceline {
namespace {

constexpr double kNoise = 0.2 * 0.2;  // of a step, as all variances here of the logarithm of seconds; what disturbs one
                                      // disturbs the next, too
constexpr double kPaceStep = 0.03 * 0.03;  // by which the pace wanders from one step to the next
constexpr double kForget = 1.0 / 8192;     // of what is known of the shape of curves, with each step that counts
constexpr double kAnyPace = 0.3 * 0.3;     // of the present against an earlier run
constexpr double kFarOut = 2.0;            // standard deviations; a step counts no further than that
constexpr double kDoubt = 256.0;           // part of its square that counts against what is known of the size
constexpr int kJumpAfter = 3;              // steps in a row that are as far out: it is not one size
constexpr double kUnseen = 1e-3;           // weight of a size that was never seen, in steps
constexpr int64_t kStaleAfter = 4096;      // steps since a size was last seen: it is believed less and less then
constexpr double kFading = 0.02;           // of the way to what the floor says, at each fit
constexpr int64_t kRefitAfter = 4;         // observations
constexpr int64_t kLookEvery = 8;          // steps of a settled size, at most
constexpr double kTrust = CostCurve::kTrust;

// The least value at which half of the weight is reached.
double weighted_median(std::vector<std::pair<double, double>> members) {
  double total = 0.0, reached = 0.0;
  for (const auto& [value, weight] : members) total += weight;
  std::sort(members.begin(), members.end());
  for (const auto& [value, weight] : members) {
    reached += weight;
    if (reached >= total / 2.0) return value;
  }
  return members.back().first;
}

std::vector<double> rising(const std::vector<double>& values, const std::vector<double>& weights) {
  struct Pool {
    double median;
    std::vector<std::pair<double, double>> members;
  };
  if (weights.size() != values.size()) throw std::invalid_argument("weights: one for each value");
  if (std::any_of(values.begin(), values.end(), [](double value) { return std::isnan(value); })) return values;
  std::vector<Pool> pools;
  for (size_t i = 0; i < values.size(); ++i) {
    Pool next{values[i], {{values[i], weights[i]}}};
    while (!pools.empty() && pools.back().median >= next.median) {
      std::vector<std::pair<double, double>> members = std::move(pools.back().members);
      pools.pop_back();
      members.insert(members.end(), next.members.begin(), next.members.end());
      const double median = weighted_median(members);
      next = {median, std::move(members)};
    }
    pools.push_back(std::move(next));
  }
  std::vector<double> out;
  for (const Pool& pool : pools) out.insert(out.end(), pool.members.size(), pool.median);
  return out;
}

}  // namespace

double floor_shape(double rows) {
  constexpr double kKnee = 16.0, kSlope = 1.0 / 64;
  return (1.0 + kSlope * (rows - 1.0)) * std::max(1.0, rows / kKnee);
}

Pace::Pace(std::vector<int64_t> knots, std::vector<double> floor, const std::vector<std::vector<double>>& shapes,
           double any_level)
    : knots(std::move(knots)), floor(std::move(floor)), any_level_(any_level) {
  const size_t n = this->knots.size();
  if (n == 0 || this->floor.size() != n || shapes.size() != n ||
      !std::is_sorted(this->knots.begin(), this->knots.end()))
    throw std::invalid_argument("knots: ascending, each with a floor and a row of shapes");
  for (const std::vector<double>& row : shapes) {
    if (row.size() != n) throw std::invalid_argument("shapes: a square");
    shapes_.insert(shapes_.end(), row.begin(), row.end());
  }
}

size_t Pace::join() {
  const size_t first = mean.size(), own = knots.size(), n = first + own;
  std::vector<double> cov(n * n, 0.0), wander(n * n, 0.0);
  for (size_t i = 0; i < first; ++i)
    for (size_t j = 0; j < first; ++j) {
      cov[i * n + j] = cov_[i * first + j];
      wander[i * n + j] = wander_[i * first + j] - kPaceStep;
    }
  for (size_t i = 0; i < own; ++i)
    for (size_t j = 0; j < own; ++j) {
      cov[(first + i) * n + first + j] = shapes_[i * own + j] + any_level_;
      wander[(first + i) * n + first + j] = kForget * shapes_[i * own + j];
    }
  for (double& w : wander) w += kPaceStep;
  cov_ = std::move(cov);
  wander_ = std::move(wander);
  mean.insert(mean.end(), floor.begin(), floor.end());
  return first;
}

double Pace::column(const std::vector<std::pair<size_t, double>>& shares) {
  const size_t n = mean.size();
  column_.assign(n, 0.0);
  bool begun = false;
  for (const auto& [knot, share] : shares) {
    const double* row = &cov_[knot * n];
    for (size_t j = 0; j < n; ++j) column_[j] = begun ? column_[j] + share * row[j] : share * row[j];
    begun = true;
  }
  double variance = 0.0;
  for (const auto& [knot, share] : shares) variance += share * column_[knot];
  return kNoise + variance;
}

void Pace::observe(const std::vector<std::pair<size_t, double>>& near, double seconds, bool known, bool again) {
  const size_t n = mean.size();
  for (size_t i = 0; i < n * n; ++i) cov_[i] = cov_[i] * (1.0 - kForget) + wander_[i];
  std::vector<std::pair<size_t, double>> shares;
  double total = 0.0;
  for (const auto& [knot, share] : near) {
    shares.emplace_back(knot, share * std::exp(mean[knot]));
    total += shares.back().second;
  }
  for (auto& [knot, part] : shares) part /= total;
  double surprise = std::log(seconds / total), variance = column(shares);
  const double most = kFarOut * std::sqrt(variance);
  if (std::abs(surprise) <= most || !known) {
    far_out_ = 0;
  } else {
    far_out_ = surprise > 0.0 ? std::max(0, far_out_) + 1 : std::min(0, far_out_) - 1;
    if (again || std::abs(far_out_) >= kJumpAfter) {  // the pace has jumped
      for (double& c : cov_) c += surprise * surprise;
      variance = column(shares);
    } else {  // it may have, or the step was interrupted, or this size is another than it was
      for (const auto& [knot, share] : near) cov_[knot * n + knot] += surprise * surprise / kDoubt;
      variance = column(shares);
      surprise = std::copysign(most, surprise);
    }
  }
  for (size_t i = 0; i < n; ++i) {
    const double gain = column_[i] / variance;
    mean[i] += gain * surprise;
    double* row = &cov_[i * n];
    for (size_t j = 0; j < n; ++j) row[j] -= gain * column_[j];
  }
}

void Pace::preset(size_t first, const std::vector<double>& values, const std::vector<std::vector<double>>& cov) {
  const size_t n = mean.size(), own = knots.size();
  if (values.size() != own || cov.size() != own) throw std::invalid_argument("values and cov: one for each knot");
  for (size_t i = 0; i < own; ++i) {
    if (cov[i].size() != own) throw std::invalid_argument("cov: a square");
    mean[first + i] = values[i];
    for (size_t j = 0; j < n; ++j) cov_[(first + i) * n + j] = cov_[j * n + first + i] = 0.0;
  }
  for (size_t i = 0; i < own; ++i)
    for (size_t j = 0; j < own; ++j) cov_[(first + i) * n + first + j] = cov[i][j];
  for (double& c : cov_) c += kAnyPace;
}

CostCurve::CostCurve(std::shared_ptr<Pace> pace)
    : pace_(std::move(pace)), first_(pace_->join()), weight_(pace_->knots.size(), 0.0), last_(pace_->knots.size(), 0) {}

std::vector<std::pair<size_t, double>> CostCurve::near(int64_t rows) const {
  const std::vector<int64_t>& knots = pace_->knots;
  if (rows <= knots.front()) return {{0, 1.0}};
  const size_t at = size_t(std::upper_bound(knots.begin(), knots.end(), rows) - knots.begin()) - 1;
  if (at + 1 == knots.size() || knots[at] == rows) return {{at, 1.0}};
  const double share = double(rows - knots[at]) / double(knots[at + 1] - knots[at]);
  return {{at, 1.0 - share}, {at + 1, share}};
}

void CostCurve::observe(int64_t rows, double seconds) {
  const auto [looked, first] = looked_.try_emplace(rows, changes);
  if (first || !(seconds > 0.0) || std::isinf(seconds)) return;
  ++changes;
  const bool again = before_ == rows;
  before_ = rows;
  std::vector<std::pair<size_t, double>> around = near(rows);
  double weight = std::numeric_limits<double>::infinity();
  for (const auto& [knot, share] : around) weight = std::min(weight, weight_[knot]);
  const bool known = weight >= kTrust;
  if (known && changes - looked->second < std::min(kLookEvery, int64_t(weight / double(kLookEvery)))) return;
  looked->second = changes;
  std::vector<std::pair<size_t, double>> places = around;
  for (auto& [knot, share] : places) knot += first_;
  pace_->observe(places, seconds, known, again);
  ++stale_;
  for (const auto& [knot, share] : around) {
    last_[knot] = changes;
    weight_[knot] += share;
  }
  known_ = true;
  if (stale_ >= kRefitAfter || !known) {
    stale_ = 0;
    ++pace_->fits;
  }
}

void CostCurve::start(const std::vector<double>& values, const std::vector<std::vector<double>>& cov,
                      const std::vector<size_t>& knots) {
  for (const size_t knot : knots)
    if (knot >= weight_.size()) throw std::invalid_argument("knots: there is none at " + std::to_string(knot));
  pace_->preset(first_, values, cov);
  known_ = true;
  std::fill(weight_.begin(), weight_.end(), 0.0);
  for (const size_t knot : knots) weight_[knot] = 2.0 * kTrust;
  ++pace_->fits;
}

void CostCurve::fade() {
  const size_t now = size_t(std::max_element(last_.begin(), last_.end()) - last_.begin());
  double* values = &pace_->mean[first_];
  const std::vector<double> before(values, values + weight_.size());
  for (size_t knot = 0; knot < weight_.size(); ++knot)
    if (weight_[knot] != 0.0 && last_[now] - last_[knot] > kStaleAfter) {
      const double target = before[now] + pace_->floor[knot] - pace_->floor[now];
      values[knot] = before[knot] + kFading * std::min(0.0, target - before[knot]);
    }
}

void CostCurve::refit() {
  if (fit_of_ == pace_->fits || !known_) return;
  fade();
  double* values = &pace_->mean[first_];
  const std::vector<int64_t>& knots = pace_->knots;
  const size_t n = weight_.size();
  std::vector<double> seconds(n), weights(n);
  size_t last = 0;
  for (size_t knot = 0; knot < n; ++knot) {
    seconds[knot] = std::exp(values[knot]);
    weights[knot] = weight_[knot] != 0.0 ? std::min(weight_[knot], 64.0) : kUnseen;
    if (weight_[knot] != 0.0) last = knot;
  }
  fitted_ = rising(seconds, weights);
  // beyond what was seen a row never takes more
  for (size_t knot = last + 1; knot < n; ++knot)
    fitted_[knot] = std::min(fitted_[knot], fitted_[knot - 1] * double(knots[knot]) / double(knots[knot - 1]));
  fit_of_ = pace_->fits;
  // what is learned starts from here again: values that smoothing hides would drift away unseen
  for (size_t knot = 0; knot < n; ++knot)
    if (weight_[knot] != 0.0) values[knot] = std::log(fitted_[knot]);
}

double CostCurve::seconds(int64_t rows) {
  refit();
  if (fitted_.empty()) return floor_shape(double(rows));
  const int64_t most = pace_->knots.back();
  if (rows >= most) return fitted_.back() * floor_shape(double(rows)) / floor_shape(double(most));
  double sum = 0.0;
  for (const auto& [knot, share] : near(rows)) sum += share * fitted_[knot];
  return sum;
}

std::vector<double> CostCurve::several(int64_t rows, int64_t more) {
  std::vector<double> out;
  for (int64_t n = 0; n <= more; ++n) out.push_back(seconds(rows + n));
  return out;
}

bool CostCurve::settled(int64_t rows, double steps) const {
  const auto around = near(rows);
  return std::all_of(around.begin(), around.end(), [&](const auto& at) { return weight_[at.first] >= steps; });
}

std::map<int64_t, double> CostCurve::medians() {
  refit();
  std::map<int64_t, double> out;
  for (size_t knot = 0; knot < weight_.size(); ++knot)
    if (weight_[knot] >= kTrust) out[pace_->knots[knot]] = std::exp(pace_->mean[first_ + knot]);
  return out;
}

double CostCurve::row_seconds() {
  int64_t largest = 1;
  for (size_t knot = 0; knot < weight_.size(); ++knot)
    if (weight_[knot] != 0.0) largest = pace_->knots[knot];
  return std::max(seconds(1) / 16.0, largest > 16 ? seconds(largest) / double(largest) : 0.0);
}

}  // namespace paceline

void register_cost_curve(nb::module_& m) {
  using paceline::CostCurve;
  using paceline::Pace;
  nb::class_<Pace>(m, "Pace", "What curves of costs share; see cost_table.Pace.")
      .def(nb::init<std::vector<int64_t>, std::vector<double>, const std::vector<std::vector<double>>&, double>(),
           "knots"_a, "floor"_a, "shapes"_a, "any_level"_a,
           "knots: rows, ascending. floor: logarithms of seconds there of a curve of which nothing is known. shapes: "
           "covariance of curves around it, without their level, whose variance is any_level.");
  nb::class_<CostCurve>(m, "CostCurve", "See cost_table.CostCurve.")
      .def(nb::init<std::shared_ptr<Pace>>(), "pace"_a)
      .def_rw("changes", &CostCurve::changes, "Steps that were observed.")
      .def_prop_ro("known", &CostCurve::known, "Whether anything was observed.")
      .def("observe", &CostCurve::observe, "rows"_a, "seconds"_a,
           "The first step of a size does not count: it touches memory first. Of sizes that are known well enough, one "
           "in a few does: the better they are known, the fewer.")
      .def("start", &CostCurve::start, "values"_a, "cov"_a, "knots"_a,
           "Begin with these logarithms of seconds at the knots and their covariance; knots: places of those that an "
           "earlier run has shown.")
      .def("seconds", &CostCurve::seconds, "rows"_a,
           "At the pace of late; in passes of one row as long as nothing was observed.")
      .def("several", &CostCurve::several, "rows"_a, "more"_a, "The same of rows, rows + 1, ..., rows + more.")
      .def("settled", &CostCurve::settled, "rows"_a, "steps"_a = CostCurve::kTrust,
           "Whether that many steps showed what passes of so many rows take.")
      .def_prop_ro("medians", &CostCurve::medians, "Rows -> seconds, of the knots that were learned.")
      .def_prop_ro("row_seconds", &CostCurve::row_seconds, "What a row costs in a pass of many.");
  m.def("rising", &paceline::rising, "values"_a, "weights"_a, "See cost_table.rising.");
}
