// Arithmetic of how many tokens to draft and to verify: a few numbers for each request, at every step. Behind a pass
// nothing of the interpreter is left in the caches, so that in Python each of these takes tens of microseconds.
//
// All of it is double precision in the order of the formulas, and no sum is re-associated: choices are those that the
// same lines of Python would make.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cost_curve.h"

namespace nb = nanobind;
using namespace nb::literals;

void register_draft_lengths(nb::module_& m);

namespace {

using Row = std::vector<double>;
using Rows = std::vector<Row>;
using Lengths = std::vector<int64_t>;
using paceline::CostCurve;

constexpr double kPriorWeight = 6.0;  // drafts of other requests count as much as this many of a request's own
constexpr double kUnknown = 0.7;      // chance of a first draft of which nothing is known

// What became of drafts, per position; see the binding.
class Acceptance {
 public:
  Row tries, hits;

  void observe(int64_t drafted, int64_t accepted, double forget) {
    if (drafted < 0 || accepted < 0) throw std::invalid_argument("drafted and accepted: none is below 0");
    if (forget != 1.0) fade(forget);
    const size_t reached = size_t(std::min(drafted, accepted + 1));  // positions that were put to the test
    grow(reached);
    for (size_t j = 0; j < reached; ++j) {
      tries[j] += 1.0;
      hits[j] += int64_t(j) < accepted ? 1.0 : 0.0;
    }
  }

  void fade(double share) {
    for (double& x : tries) x *= share;
    for (double& x : hits) x *= share;
  }

  void expect(int64_t first, const Row& chances, double forget) {
    if (first < 0) throw std::invalid_argument("first: not below 0");
    if (forget != 1.0) fade(forget);
    grow(size_t(first) + chances.size());
    double reached = 1.0;
    for (size_t j = 0; j < chances.size(); ++j) {
      tries[size_t(first) + j] += reached;
      reached *= chances[j];
      hits[size_t(first) + j] += reached;
    }
  }

  Row survival(int64_t length, const Acceptance* prior) const {
    Row out;
    out.reserve(size_t(std::max<int64_t>(0, length)));
    double alive = 1.0, last = kUnknown;
    for (size_t j = 0; int64_t(j) < length; ++j) {
      const bool own = j < tries.size();
      double base = last;
      if (prior != nullptr && j < prior->tries.size() && prior->tries[j] > 0.0)
        base = (prior->hits[j] + last) / (prior->tries[j] + 1.0);
      last = ((own ? hits[j] : 0.0) + kPriorWeight * base) / ((own ? tries[j] : 0.0) + kPriorWeight);
      alive *= last;
      out.push_back(alive);
    }
    return out;
  }

 private:
  void grow(size_t positions) {
    if (tries.size() >= positions) return;
    tries.resize(positions, 0.0);
    hits.resize(positions, 0.0);
  }
};

struct Draft {
  double survival;
  int32_t request, position;
};

// All drafts, those that are most likely to be kept first.
std::vector<Draft> by_survival(const Rows& survivals) {
  std::vector<Draft> out;
  for (size_t i = 0; i < survivals.size(); ++i)
    for (size_t j = 0; j < survivals[i].size(); ++j) {
      const double s = survivals[i][j];
      out.push_back({std::isnan(s) ? 0.0 : s, int32_t(i), int32_t(j)});  // what is no number has no place in an order
    }
  const auto before = [](const Draft& a, const Draft& b) {
    if (a.survival != b.survival) return a.survival > b.survival;
    return a.request != b.request ? a.request < b.request : a.position < b.position;
  };
  if (!std::is_sorted(out.begin(), out.end(), before)) std::sort(out.begin(), out.end(), before);
  return out;
}

Lengths allot(const std::vector<Draft>& drafts, size_t count, size_t requests) {
  Lengths out(requests, 0);
  for (size_t n = 0; n < count; ++n) ++out[size_t(drafts[n].request)];
  return out;
}

void need(size_t given, size_t wanted, const char* name) {
  if (given < wanted)
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(given) + " values, expected " +
                                std::to_string(wanted));
}

std::pair<Lengths, double> best_lengths(const Rows& survivals, double rows, const Row& seconds, const Row& prices,
                                        const std::vector<bool>& found, double margin) {
  const std::vector<Draft> order = by_survival(survivals);
  need(seconds.size(), order.size() + 1, "seconds");
  if (!found.empty()) need(found.size(), survivals.size(), "found");
  const double plain = rows / seconds[0];
  double best_rate = (1.0 + margin) * plain, expected = rows;
  size_t best = 0, drawn = 0;
  for (size_t n = 1; n <= order.size(); ++n) {
    const Draft& draft = order[n - 1];
    expected += draft.survival;
    drawn += found.empty() || !found[size_t(draft.request)];
    need(prices.size(), drawn + 1, "prices");
    const double rate = expected / ((drawn ? prices[drawn] : 0.0) + seconds[n]);
    if (rate > best_rate) {
      best = n;
      best_rate = rate;
    }
  }
  return {allot(order, best, survivals.size()), best ? best_rate / plain : 1.0};
}

Lengths admitted(const Rows& survivals, double rows, const Row& seconds, double paid) {
  const std::vector<Draft> order = by_survival(survivals);
  need(seconds.size(), order.size() + 1, "seconds");
  double expected = rows, best_rate = rows / (paid + seconds[0]);
  size_t best = 0;
  for (size_t n = 1; n <= order.size(); ++n) {
    expected += order[n - 1].survival;
    const double rate = expected / (paid + seconds[n]);
    if (rate > best_rate) {
      best = n;
      best_rate = rate;
    }
  }
  return allot(order, best, survivals.size());
}

std::pair<Lengths, double> likeliest(const Rows& survivals, int64_t drafts) {
  const std::vector<Draft> order = by_survival(survivals);
  const size_t count = std::min(order.size(), size_t(std::max<int64_t>(0, drafts)));
  double expected = 0.0;
  for (size_t n = 0; n < count; ++n) expected += order[n].survival;
  return {allot(order, count, survivals.size()), expected};
}

Rows survivals_of(const Rows& chances, double trust) {
  Rows out(chances.size());
  for (size_t i = 0; i < chances.size(); ++i) {
    out[i].reserve(chances[i].size());
    double alive = 1.0;
    for (const double chance : chances[i]) {
      alive *= chance;
      const double said = trust * alive;
      out[i].push_back(said < 1.0 ? said : 1.0);
    }
  }
  return out;
}

// What a row costs more for each slot, when all blocks have one slot more: slopes of the largest convex curve below the
// costs, since a dear slot may be what leads to cheap ones.
Row row_prices(const Row& seconds, size_t blocks, size_t slots) {
  need(seconds.size(), blocks * slots + 1, "seconds");
  std::vector<size_t> corners{0};
  const auto slope = [&](size_t from, size_t to) {
    return (seconds[to * blocks] - seconds[from * blocks]) / double((to - from) * blocks);
  };
  for (size_t j = 1; j <= slots; ++j) {
    while (corners.size() > 1 && slope(corners[corners.size() - 2], corners.back()) >= slope(corners.back(), j))
      corners.pop_back();
    corners.push_back(j);
  }
  Row out;
  for (size_t c = 1; c < corners.size(); ++c)
    out.insert(out.end(), corners[c] - corners[c - 1], slope(corners[c - 1], corners[c]));
  return out;
}

Row slot_worths(Row worths, const Rows& survivals, const Row& seconds, double token, double steps) {
  size_t longest = 0;
  for (const Row& row : survivals) longest = std::max(longest, row.size());
  const Row prices = row_prices(seconds, survivals.size(), longest);
  for (const Row& row : survivals) {
    const size_t before = worths.size();
    for (size_t j = 0; j < row.size(); ++j) {
      const double saved = row[j] * token - prices[j], worth = saved > 0.0 ? saved : 0.0;
      if (j < before)
        worths[j] += (worth - worths[j]) / steps;
      else
        worths.push_back(worth);
    }
  }
  return worths;
}

bool alike(const Rows& a, const Rows& b, double by) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size()) return false;
    for (size_t j = 0; j < a[i].size(); ++j)
      if (!(std::abs(a[i][j] - b[i][j]) <= by)) return false;
  }
  return true;
}

// What requests showed, and lengths that were chosen for them a few steps ago; see the binding.
class DraftMemory {
 public:
  Acceptance overall;
  double promised, kept;  // drafts, by their chances and in truth

  DraftMemory(double forget, double forget_overall, double trust, double forget_trust)
      : promised(trust), kept(trust), forget_(forget), forget_overall_(forget_overall), forget_trust_(forget_trust) {}

  double trust() const { return kept / promised; }

  Rows survivals(const Lengths& requests, const Lengths& limits) const {
    need(limits.size(), requests.size(), "limits");
    Rows out(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      const auto own = own_.find(requests[i]);
      out[i] = own == own_.end() ? overall.survival(limits[i], nullptr) : own->second.survival(limits[i], &overall);
    }
    return out;
  }

  void keep(const Lengths& requests, const Lengths& limits, int64_t rows, double margin, double like, int64_t steps) {
    chosen_for_ = {requests, limits, rows, margin, survivals(requests, limits), like, steps};
  }

  void drop() { chosen_for_.steps = 0; }

  bool holds(const Lengths& requests, const Lengths& limits, int64_t rows, double margin) {
    Circumstances& then = chosen_for_;
    const bool good = then.steps > 0 && then.rows == rows && then.margin == margin && then.requests == requests &&
                      then.limits == limits && alike(survivals(requests, limits), then.survivals, then.like);
    then.steps = good ? then.steps - 1 : 0;
    return good;
  }

  void cut(const Lengths& requests, nb::list drafts, const Rows& chances, const Lengths& lengths) {
    const size_t n = requests.size();
    if (drafts.size() != n || chances.size() != n || lengths.size() != n)
      throw std::invalid_argument("requests, drafts, chances and lengths: as many of each");
    for (size_t i = 0; i < n; ++i) {
      nb::list row = nb::cast<nb::list>(drafts[i]);
      const size_t made = row.size();
      const Row& said = chances[i];
      if (!made) continue;
      if (lengths[i] < 0) throw std::invalid_argument("lengths: none is below 0");
      const size_t length = std::min(size_t(lengths[i]), made);
      need(said.size(), length, "chances");
      if (!said.empty() && *std::min_element(said.begin(), said.end()) < 1.0) {  // others are found, not drafted
        double sum = 0.0, alive = 1.0;
        for (size_t j = 0; j < length; ++j) sum += alive *= said[j];
        said_[requests[i]] = sum;
      }
      if (length < made) {
        cut_[requests[i]] = Row(said.begin() + long(length), said.end());
        if (PyList_SetSlice(row.ptr(), Py_ssize_t(length), Py_ssize_t(made), nullptr) != 0) throw nb::python_error();
      }
    }
  }

  // `cut` to the best lengths, where both curves have learned enough; else false, and nothing is done.
  bool trim(const Lengths& requests, nb::list drafts, const Rows& chances, int64_t rows, CostCurve& verify,
            CostCurve& draft, double few) {
    int64_t blocks = 0, made = 0;
    for (const nb::handle row : drafts) {
      const int64_t length = int64_t(nb::len(row));
      blocks += length > 0;
      made += length;
    }
    if (!made) return true;
    const int64_t slots = std::min(blocks, made) + made;
    if (!draft.known() || !draft.settled(slots, few)) return false;
    int64_t most = 0;
    for (const Row& row : chances) most += int64_t(row.size());
    cut(requests, drafts, chances,
        admitted(survivals_of(chances, trust()), double(rows), verify.several(rows, most), draft.seconds(slots)));
    return true;
  }

  void leave_out(int64_t request, const Row& chances) { cut_[request] = chances; }

  void observe(int64_t request, int64_t drafted, int64_t accepted) {
    Row cut;
    if (const auto found = cut_.find(request); found != cut_.end()) {
      cut = std::move(found->second);
      cut_.erase(found);
    }
    if (const auto found = said_.find(request); found != said_.end()) {
      if (drafted) {
        promised = forget_trust_ * promised + found->second;
        kept = forget_trust_ * kept + double(accepted);
      }
      said_.erase(found);
    }
    if (!drafted && cut.empty()) return;
    Acceptance& own = own_[request];
    if (drafted) {
      overall.observe(drafted, accepted, forget_overall_);
      own.observe(drafted, accepted, forget_);
    }
    if (!cut.empty() && accepted == drafted) {
      overall.expect(drafted, cut, drafted ? 1.0 : forget_overall_);
      own.expect(drafted, cut, drafted ? 1.0 : forget_);
    }
  }

  void finish(int64_t request) {
    own_.erase(request);
    cut_.erase(request);
    said_.erase(request);
  }

  const Acceptance* of(int64_t request) const {
    const auto own = own_.find(request);
    return own == own_.end() ? nullptr : &own->second;
  }

  size_t size() const { return own_.size() + cut_.size() + said_.size(); }

 private:
  struct Circumstances {
    Lengths requests, limits;
    int64_t rows = 0;
    double margin = 0.0;
    Rows survivals;
    double like = 0.0;
    int64_t steps = 0;  // for which they are still good
  };
  const double forget_, forget_overall_, forget_trust_;
  std::unordered_map<int64_t, Acceptance> own_;
  std::unordered_map<int64_t, Row> cut_;      // chances of drafts that were made and not verified
  std::unordered_map<int64_t, double> said_;  // drafts to be kept, by their chances, among those that are verified
  Circumstances chosen_for_;
};

Row calibrated(const Row& logits, const Row& own, const std::optional<std::tuple<double, double, double>>& mix,
               const Row& temperatures) {
  if (mix) need(own.size(), logits.size(), "own");
  Row out;
  out.reserve(logits.size());
  for (size_t j = 0; j < logits.size(); ++j) {
    double x = logits[j];
    if (mix) x = std::get<0>(*mix) * x + std::get<1>(*mix) * own[j] + std::get<2>(*mix);
    if (!temperatures.empty()) x /= temperatures[std::min(j, temperatures.size() - 1)];
    out.push_back(1.0 / (1.0 + std::exp(-x)));
  }
  return out;
}

}  // namespace

void register_draft_lengths(nb::module_& m) {
  nb::class_<Acceptance>(m, "Acceptance",
                         "Conditional acceptance per position, with exponential forgetting: tries and hits of the "
                         "drafts so far.")
      .def(nb::init<>())
      .def_ro("tries", &Acceptance::tries, "Drafts that were put to the test, per position.")
      .def_ro("hits", &Acceptance::hits, "Those of them that were kept.")
      .def("observe", &Acceptance::observe, "drafted"_a, "accepted"_a, "forget"_a = 1.0,
           "A draft of `drafted` tokens of which the first `accepted` were kept.")
      .def("fade", &Acceptance::fade, "share"_a, "Keep this share of the weight of what was seen.")
      .def("expect", &Acceptance::expect, "first"_a, "chances"_a, "forget"_a = 1.0,
           "Drafts behind the first `first`, all of which were kept, that were not put to the test: counted by their "
           "calibrated chances, so that what was left out because it was doubtful does not look good.")
      .def("survival", &Acceptance::survival, "length"_a, "prior"_a = nb::none(),
           "Chance that each of `length` positions is kept; positions never tried follow the one before.");
  nb::class_<DraftMemory>(m, "DraftMemory",
                          "What requests showed of their drafts, by their numbers, and lengths that are kept for a few "
                          "steps.")
      .def(nb::init<double, double, double, double>(), "forget"_a, "forget_overall"_a, "trust"_a, "forget_trust"_a,
           "Weights of the past of a request and of all, at each draft; drafts for which chances are trusted as they "
           "are, and the weight of those before at each.")
      .def_ro("overall", &DraftMemory::overall, "Of all requests.")
      .def_ro("promised", &DraftMemory::promised, "Drafts that were to be kept by their chances.")
      .def_ro("kept", &DraftMemory::kept, "Those that were.")
      .def_prop_ro("trust", &DraftMemory::trust, "Of what chances promise, what came.")
      .def("of", &DraftMemory::of, "request"_a, nb::rv_policy::reference_internal, "Of one request; None: nothing.")
      .def("__len__", &DraftMemory::size, "Entries of requests.")
      .def("survivals", &DraftMemory::survivals, "requests"_a, "limits"_a,
           "Chance of each of limits[i] drafts of each request to be kept together with those before it.")
      .def("keep", &DraftMemory::keep, "requests"_a, "limits"_a, "rows"_a, "margin"_a, "like"_a, "steps"_a,
           "Lengths were chosen for these, and are good for so many steps, as long as no survival changes by more than "
           "`like`.")
      .def("drop", &DraftMemory::drop, "Not for any more.")
      .def("holds", &DraftMemory::holds, "requests"_a, "limits"_a, "rows"_a, "margin"_a,
           "Whether those lengths are good for this step, which counts as one of the steps. If not, they are dropped.")
      .def("cut", &DraftMemory::cut, "requests"_a, "drafts"_a, "chances"_a, "lengths"_a,
           "Cut drafts, in place, to lengths, and remember what their chances promise and what was left out.")
      .def("trim", &DraftMemory::trim, "requests"_a, "drafts"_a, "chances"_a, "rows"_a, "verify"_a, "draft"_a, "few"_a,
           "`cut` to what is worth verifying (see allotment.admitted) beside `rows` rows, where `few` steps have shown "
           "what such drafts take; else False, and nothing is done.")
      .def("leave_out", &DraftMemory::leave_out, "request"_a, "chances"_a,
           "Drafts with these chances were not verified.")
      .def("observe", &DraftMemory::observe, "request"_a, "drafted"_a, "accepted"_a, "What became of a draft.")
      .def("finish", &DraftMemory::finish, "request"_a, "The request has ended.");
  m.def("best_lengths", &best_lengths, "survivals"_a, "rows"_a, "seconds"_a, "prices"_a, "found"_a, "margin"_a,
        "See allotment.best_lengths. seconds[n]: of a pass of rows + n. prices[n]: of making n drafts.");
  m.def("admitted", &admitted, "survivals"_a, "rows"_a, "seconds"_a, "paid"_a,
        "See allotment.admitted. seconds[n]: of a pass of rows + n.");
  m.def("likeliest", &likeliest, "survivals"_a, "drafts"_a, "See allotment.likeliest.");
  m.def("survivals_of", &survivals_of, "chances"_a, "trust"_a = 1.0, "See allotment.survivals_of.");
  m.def("slot_worths", &slot_worths, "worths"_a, "survivals"_a, "seconds"_a, "token_seconds"_a, "steps"_a,
        "See allotment.slot_worths. seconds[n]: of a pass with n drafts.");
  m.def("alike", &alike, "a"_a, "b"_a, "by"_a, "Whether two lists of rows differ by no more in any place.");
  m.def("calibrated", &calibrated, "logits"_a, "own"_a, "mix"_a.none(), "temperatures"_a,
        "See Calibration.chances. Of no temperatures, 1; of too few, the last one.");
}
