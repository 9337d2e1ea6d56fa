// Costs of steps by the rows of their passes, as they are learned while running.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace paceline {

// Seconds of a pass in passes of one row, of which nothing else is known.
double floor_shape(double rows);

// What is known of the logarithms of seconds at the knots of some curves, which the machine's pace moves together.
class Pace {
 public:
  Pace(std::vector<int64_t> knots, std::vector<double> floor, const std::vector<std::vector<double>>& shapes,
       double any_level);

  const std::vector<int64_t> knots;  // rows
  const std::vector<double> floor;
  std::vector<double> mean;
  int64_t fits = 0;  // times that what curves were fitted to has changed

  // A curve of nothing known: the place of its first knot.
  size_t join();
  // A step took so long; near: the knots around its size with their shares. known: the size is, so that it can be far
  // out. again: the step before had the same size, so that what has changed since is the pace.
  void observe(const std::vector<std::pair<size_t, double>>& near, double seconds, bool known, bool again);
  void preset(size_t first, const std::vector<double>& values, const std::vector<std::vector<double>>& cov);

 private:
  // Covariance of all knots with what such a step takes, into column_; returns the variance of that.
  double column(const std::vector<std::pair<size_t, double>>& shares);

  const double any_level_;
  std::vector<double> shapes_;
  std::vector<double> cov_, wander_;  // wander: added to it with each step
  std::vector<double> column_;
  int far_out_ = 0;  // steps in a row that were, below 0 if they were short
};

class CostCurve {
 public:
  static constexpr double kTrust = 12.0;  // steps after which a size is known; what an earlier run learned counts twice

  explicit CostCurve(std::shared_ptr<Pace> pace);

  int64_t changes = 0;

  bool known() const { return known_; }
  void observe(int64_t rows, double seconds);
  void start(const std::vector<double>& values, const std::vector<std::vector<double>>& cov,
             const std::vector<size_t>& knots);
  double seconds(int64_t rows);
  std::vector<double> several(int64_t rows, int64_t more);
  bool settled(int64_t rows, double steps) const;
  std::map<int64_t, double> medians();
  double row_seconds();

 private:
  // The knots around a size, with their shares.
  std::vector<std::pair<size_t, double>> near(int64_t rows) const;
  // What looks dear and was not seen for long is slowly taken to cost what the floor says, until it is tried.
  void fade();
  // Seconds of all knots such that more rows never take less.
  void refit();

  const std::shared_ptr<Pace> pace_;
  const size_t first_;
  bool known_ = false;
  std::unordered_map<int64_t, int64_t> looked_;  // rows -> the step that was last looked at
  int64_t before_ = 0;                           // rows of the step before
  std::vector<double> weight_;                   // steps that showed a knot
  std::vector<int64_t> last_;                    // the step that last did
  std::vector<double> fitted_;                   // seconds of all knots
  int64_t fit_of_ = 0;                           // which of the pace's fits they are
  int64_t stale_ = 0;                            // steps that counted since
};

}  // namespace paceline
