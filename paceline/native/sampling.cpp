// Sampling as the engine uses it: requests' parameters and token counts, applied to the rows of a pass; Python
// bindings.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "sampling_draw.h"
#include "sampling_state.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace paceline::sampling;

void register_sampling(nb::module_& m);

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<int64_t>;
using Blocks = std::vector<Tokens>;

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

template <class T, int dims>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<dims>>;

template <class T, int dims>
Array<T, dims> to_numpy(std::vector<T>&& values, const size_t (&shape)[dims]) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Array<T, dims>(owned->data(), dims, shape, owner);
}

// The rows of one pass, with what may restrict them.
class Pass {
 public:
  Pass(const Logits& logits, const IdMap* map, const std::optional<Ints2>& allowed)
      : x_(logits.data()), rows_(logits.shape(0)), width_(static_cast<int>(logits.shape(1))), map_(map) {
    if (logits.shape(1) == 0 || logits.shape(1) > size_t(std::numeric_limits<int32_t>::max()))
      fail("logits: " + std::to_string(logits.shape(1)) + " columns, expected 1 to 2^31 - 1");
    if (map != nullptr && map->ids.size() != logits.shape(1))
      fail("logits: " + std::to_string(width_) + " columns, but id_map lists " + std::to_string(map->ids.size()));
    if (allowed) {
      const size_t vocab = map == nullptr ? logits.shape(1) : map->columns.size();
      words_ = (vocab + 31) / 32;
      if (allowed->shape(0) != rows_ || allowed->shape(1) != words_)
        fail("allowed: shape [" + std::to_string(allowed->shape(0)) + ", " + std::to_string(allowed->shape(1)) +
             "], expected [" + std::to_string(rows_) + ", " + std::to_string(words_) + "]");
      allowed_ = allowed->data();
    }
  }
  size_t rows() const { return rows_; }
  int width() const { return width_; }
  int64_t token(int column) const { return map_ == nullptr ? column : map_->ids[static_cast<size_t>(column)]; }

  void check(const SamplingState& state) const {
    const int vocab = map_ == nullptr ? width_ : static_cast<int>(map_->columns.size());
    if (state.vocab_size != vocab)
      fail("states: made for a vocabulary of " + std::to_string(state.vocab_size) + ", the logits have " +
           std::to_string(vocab));
  }

  // The processed logits of row r, whose request has counted everything before it.
  const RowView& view(size_t r, const SamplingState& state) {
    const float* x = x_ + r * static_cast<size_t>(width_);
    const bool masked = restricts(r);
    if (masked || state.processes()) {
      if (masked)
        mask(r, x);
      else
        scratch_.assign(x, x + width_);
      state.process(scratch_.data(), map_);
      x = scratch_.data();
    }
    view_.reset(x, width_, map_ == nullptr ? nullptr : map_->ids.data());
    return view_;
  }
  // Whether masks left nothing of row r, whose view this is.
  bool exhausted(const RowView& view, size_t r) const {
    return paceline::sampling::exhausted(view, x_ + r * static_cast<size_t>(width_));
  }
  // The target's draw in row r.
  int64_t draw(size_t r, const SamplingState& state, const NoiseKey& noise) {
    const RowView& row = view(r, state);
    return exhausted(row, r) ? kNoToken : token(draw_coupled(row, state.warp, noise));
  }

 private:
  bool permits(size_t r, int64_t id) const {
    return allowed_[r * words_ + static_cast<size_t>(id >> 5)] >> (id & 31) & 1;
  }
  bool restricts(size_t r) const {
    if (allowed_ == nullptr) return false;
    const int32_t* row = allowed_ + r * words_;
    const int vocab = map_ == nullptr ? width_ : static_cast<int>(map_->columns.size());
    for (int w = 0; w < vocab / 32; ++w)
      if (row[w] != -1) return true;
    for (int64_t id = vocab / 32 * 32; id < vocab; ++id)
      if (!permits(r, id)) return true;
    return false;
  }
  // Row r with -inf where its bitmask has no bit, into scratch_. Grammars allow few ids or nearly all of them, so most
  // words of a bitmask are all zeros or all ones.
  void mask(size_t r, const float* x) {
    const size_t width = static_cast<size_t>(width_);
    scratch_.resize(width);
    if (map_ != nullptr) {
      for (size_t c = 0; c < width; ++c) scratch_[c] = permits(r, token(static_cast<int>(c))) ? x[c] : kNegInf;
      return;
    }
    for (size_t w = 0; w < words_; ++w) {
      const uint32_t bits = static_cast<uint32_t>(allowed_[r * words_ + w]);
      const size_t begin = w * 32, count = std::min<size_t>(32, width - begin);
      float* out = scratch_.data() + begin;
      if (bits == ~0u)
        std::copy_n(x + begin, count, out);
      else if (bits == 0)
        std::fill_n(out, count, kNegInf);
      else
        for (size_t i = 0; i < count; ++i) out[i] = (bits >> i & 1) != 0 ? x[begin + i] : kNegInf;
    }
  }

  const float* x_;
  size_t rows_;
  int width_;
  const IdMap* map_;
  const int32_t* allowed_ = nullptr;
  size_t words_ = 0;
  static thread_local std::vector<float> scratch_;
  static thread_local RowView view_;
};
thread_local std::vector<float> Pass::scratch_;
thread_local RowView Pass::view_;

void check_blocks(const Pass& pass, const std::vector<SamplingState*>& states, const Blocks& drafts) {
  if (!drafts.empty() && drafts.size() != states.size())
    fail("drafts: " + std::to_string(drafts.size()) + " blocks for " + std::to_string(states.size()) + " states");
  size_t rows = states.size();
  for (size_t i = 0; i < states.size(); ++i) {
    pass.check(*states[i]);
    if (drafts.empty()) continue;
    rows += drafts[i].size();
    for (int64_t id : drafts[i]) states[i]->check(id, "drafts");
  }
  if (rows != pass.rows())
    fail("logits: " + std::to_string(pass.rows()) + " rows, but states and drafts need " + std::to_string(rows));
}

// Calls visit(row index, state, j) for every row, with drafts 1..j of its block counted.
template <class Visit>
void each_row(const std::vector<SamplingState*>& states, const Blocks& drafts, Visit&& visit) {
  size_t row = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    Prefix prefix(*states[i]);
    const size_t count = drafts.empty() ? 0 : drafts[i].size();
    for (size_t j = 0; j <= count; ++j) {
      if (j > 0) prefix.push(drafts[i][j - 1]);
      visit(row++, *states[i], j);
    }
  }
}

using Pool = std::shared_ptr<paceline::ThreadPool>;

constexpr size_t kSharedValues = 32768;  // fewer logits than these are read sooner than another thread starts

// Whether the rows of a pass are drawn by all threads of a pool: where none depends on the tokens drawn in others.
bool shared(const Pass& pass, const Pool& pool, const std::vector<SamplingState*>& states) {
  return pool && pool->size() > 1 && pass.rows() > 1 && pass.rows() * size_t(pass.width()) >= kSharedValues &&
         std::none_of(states.begin(), states.end(), [](const SamplingState* state) { return state->processes(); });
}

// Draws every row: count(i) of them belong to state i, at the positions behind its tokens.
template <class Count>
void draw_shared(Pass& pass, paceline::ThreadPool& pool, const std::vector<SamplingState*>& states, Count&& count,
                 Tokens& out) {
  std::vector<std::pair<const SamplingState*, size_t>> rows;
  for (size_t i = 0; i < states.size(); ++i)
    for (size_t j = 0; j < count(i); ++j) rows.emplace_back(states[i], j);
  pool.run([&](int tid) {
    const paceline::Range mine = paceline::share(int(rows.size()), tid, pool.size());
    for (size_t r = size_t(mine.begin); r < size_t(mine.end); ++r) {
      const SamplingState& state = *rows[r].first;
      const NoiseKey noise = state.noise(Stream::kGumbel, int64_t(rows[r].second));
      out[r] = pass.draw(r, state, noise);
    }
  });
}

Tokens sample(const Logits& logits, const std::vector<SamplingState*>& states, const Blocks& drafts,
              const std::optional<Ints2>& allowed, const Pool& pool) {
  Pass pass(logits, nullptr, allowed);
  check_blocks(pass, states, drafts);
  Tokens out(pass.rows());
  nb::gil_scoped_release release;
  if (shared(pass, pool, states)) {
    draw_shared(pass, *pool, states, [&](size_t i) { return 1 + (drafts.empty() ? 0 : drafts[i].size()); }, out);
    return out;
  }
  each_row(states, drafts, [&](size_t r, const SamplingState& state, size_t) {
    out[r] = pass.draw(r, state, state.noise(Stream::kGumbel));
  });
  return out;
}

// Draws a block per state; with `probs`, writes each row's distribution there and uses the drafter's own noise.
Tokens draft(const Logits& logits, const std::vector<SamplingState*>& states, const Tokens& counts, const IdMap* map,
             const std::optional<Ints2>& allowed, std::vector<float>* probs, const Pool& pool) {
  Pass pass(logits, map, allowed);
  int64_t rows = 0;
  for (int64_t count : counts) {
    if (count < 0 || count > static_cast<int64_t>(pass.rows()))
      fail("counts: " + std::to_string(count) + ": expected 0 to the " + std::to_string(pass.rows()) +
           " rows of logits");
    rows += count;
  }
  if (counts.size() != states.size() || rows != static_cast<int64_t>(pass.rows()))
    fail("counts: " + std::to_string(counts.size()) + " counts of " + std::to_string(rows) + " rows in all for " +
         std::to_string(states.size()) + " states and " + std::to_string(pass.rows()) + " rows of logits");
  for (const SamplingState* state : states) pass.check(*state);
  Tokens out(pass.rows());
  const size_t width = static_cast<size_t>(pass.width());
  const Stream stream = probs == nullptr ? Stream::kGumbel : Stream::kDraft;
  if (probs != nullptr) probs->resize(pass.rows() * width);
  nb::gil_scoped_release release;
  if (probs == nullptr && shared(pass, pool, states)) {
    draw_shared(pass, *pool, states, [&](size_t i) { return size_t(counts[i]); }, out);
    return out;
  }
  size_t r = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    SamplingState& state = *states[i];
    Prefix prefix(state);
    for (int64_t j = 0; j < counts[i]; ++j, ++r) {
      const RowView& view = pass.view(r, state);
      if (probs != nullptr) Distribution(view, state.warp).write(&(*probs)[r * width]);
      out[r] = pass.token(draw_coupled(view, state.warp, state.noise(stream)));
      prefix.push(out[r]);
    }
  }
  return out;
}

std::tuple<Tokens, Array<float, 2>> draft_with_probs(const Logits& logits, const std::vector<SamplingState*>& states,
                                                     const Tokens& counts, const IdMap* map,
                                                     const std::optional<Ints2>& allowed) {
  std::vector<float> probs;
  Tokens tokens = draft(logits, states, counts, map, allowed, &probs, nullptr);
  return {std::move(tokens), to_numpy(std::move(probs), {logits.shape(0), logits.shape(1)})};
}

Array<float, 2> probs(const Logits& logits, const std::vector<SamplingState*>& states, const Blocks& drafts,
                      const std::optional<Ints2>& allowed) {
  Pass pass(logits, nullptr, allowed);
  check_blocks(pass, states, drafts);
  const size_t width = static_cast<size_t>(pass.width());
  std::vector<float> out(pass.rows() * width);
  {
    nb::gil_scoped_release release;
    each_row(states, drafts, [&](size_t r, const SamplingState& state, size_t) {
      Distribution(pass.view(r, state), state.warp).write(&out[r * width]);
    });
  }
  return to_numpy(std::move(out), {pass.rows(), width});
}

// Draft distributions of a whole pass: row d belongs to the d-th draft token of all blocks in order.
class DraftRows {
 public:
  DraftRows(const std::optional<Logits>& probs, const std::optional<Ints2>& ids, size_t drafts, int vocab) {
    if (!probs) {
      if (ids) fail("draft_ids: given without draft_probs");
      return;
    }
    probs_ = probs->data();
    width_ = probs->shape(1);
    if (probs->shape(0) != drafts)
      fail("draft_probs: " + std::to_string(probs->shape(0)) + " rows for " + std::to_string(drafts) + " drafts");
    if (!ids) {
      if (width_ > static_cast<size_t>(vocab))
        fail("draft_probs: " + std::to_string(width_) + " columns, the target has " + std::to_string(vocab));
      return;
    }
    if ((ids->shape(0) != drafts && ids->shape(0) != 1) || ids->shape(1) != width_)
      fail("draft_ids: shape does not fit draft_probs; expected one row, or one row per draft, of " +
           std::to_string(width_) + " ids");
    for (size_t i = 0; i < ids->size(); ++i)
      if (ids->data()[i] < 0 || ids->data()[i] >= vocab)
        fail("draft_ids: token id " + std::to_string(ids->data()[i]) + " is outside the vocabulary of " +
             std::to_string(vocab));
    ids_ = ids->data();
    shared_ = ids->shape(0) == 1;
  }
  DraftDistribution row(size_t d) const {
    if (probs_ == nullptr) return {};
    const int32_t* ids = ids_ == nullptr ? nullptr : ids_ + (shared_ ? 0 : d * width_);
    return {probs_ + d * width_, ids, static_cast<int>(width_)};
  }

 private:
  const float* probs_ = nullptr;
  const int32_t* ids_ = nullptr;
  size_t width_ = 0;
  bool shared_ = false;
};

std::vector<std::pair<int64_t, int64_t>> reject(const Logits& logits, const std::vector<SamplingState*>& states,
                                                const Blocks& drafts, const std::optional<Logits>& draft_probs,
                                                const std::optional<Ints2>& draft_ids,
                                                const std::optional<Ints2>& allowed) {
  Pass pass(logits, nullptr, allowed);
  check_blocks(pass, states, drafts);
  const DraftRows q(draft_probs, draft_ids, pass.rows() - states.size(), pass.width());
  std::vector<std::pair<int64_t, int64_t>> out;
  nb::gil_scoped_release release;
  const int width = pass.width();
  std::vector<float> p(static_cast<size_t>(width));
  size_t row = 0, draft = 0;
  for (size_t i = 0; i < states.size(); ++i) {
    SamplingState& state = *states[i];
    const Tokens none;
    const Tokens& block = drafts.empty() ? none : drafts[i];
    Prefix prefix(state);
    size_t j = 0;
    int64_t next = kNoToken;
    for (;; ++j) {
      const RowView& view = pass.view(row + j, state);
      if (pass.exhausted(view, row + j)) break;
      const Distribution target(view, state.warp);
      if (j < block.size()) {
        const float prob = target.at(static_cast<int>(block[j]));
        if (accept_draft(prob, q.row(draft + j), block[j], uniform53(state.noise(Stream::kAccept)))) {
          prefix.push(block[j]);
          continue;
        }
      }
      target.write(p.data());
      if (j < block.size()) subtract_residual(p.data(), width, q.row(draft + j), block[j]);
      next = draw_inverse_cdf(p.data(), width, uniform53(state.noise(Stream::kNext)));
      break;
    }
    out.emplace_back(static_cast<int64_t>(j), next);
    row += block.size() + 1;
    draft += block.size();
  }
  return out;
}

std::tuple<size_t, Array<float, 1>> reject_block(const Logits& target_probs, const Tokens& drafts,
                                                 const std::vector<double>& uniforms,
                                                 const std::optional<Logits>& draft_probs,
                                                 const std::optional<Ints2>& draft_ids) {
  const int vocab = static_cast<int>(target_probs.shape(1));
  if (target_probs.shape(0) != drafts.size() + 1 || uniforms.size() != drafts.size())
    fail("target_probs: " + std::to_string(target_probs.shape(0)) + " rows and " + std::to_string(uniforms.size()) +
         " uniforms for " + std::to_string(drafts.size()) + " drafts; expected one row more than drafts");
  for (int64_t id : drafts)
    if (id < 0 || id >= vocab) fail("drafts: token id " + std::to_string(id) + " is outside the vocabulary");
  const DraftRows q(draft_probs, draft_ids, drafts.size(), vocab);
  size_t j = 0;
  std::vector<float> p;
  for (;; ++j) {
    const float* row = target_probs.data() + j * static_cast<size_t>(vocab);
    p.assign(row, row + vocab);
    if (j == drafts.size()) break;
    if (accept_draft(row[drafts[j]], q.row(j), drafts[j], uniforms[j])) continue;
    subtract_residual(p.data(), vocab, q.row(j), drafts[j]);
    break;
  }
  return {j, to_numpy(std::move(p), {static_cast<size_t>(vocab)})};
}

std::tuple<Array<float, 1>, Array<int32_t, 1>, Array<int32_t, 2>, Array<float, 2>> logprobs(
    const Logits& logits, const std::vector<int64_t>& rows, const Tokens& ids, int top_n) {
  const int width = static_cast<int>(logits.shape(1));
  if (rows.size() != ids.size())
    fail("ids: " + std::to_string(ids.size()) + " ids for " + std::to_string(rows.size()) + " rows");
  if (top_n < 0 || top_n > width)
    fail("top_n: " + std::to_string(top_n) + " is not between 0 and " + std::to_string(width));
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] < 0 || rows[i] >= static_cast<int64_t>(logits.shape(0)))
      fail("rows: " + std::to_string(rows[i]) + " is outside the " + std::to_string(logits.shape(0)) + " rows");
    if (ids[i] < 0 || ids[i] >= width)
      fail("ids: token id " + std::to_string(ids[i]) + " is outside the vocabulary of " + std::to_string(width));
  }
  const size_t n = rows.size(), m = static_cast<size_t>(top_n);
  std::vector<float> chosen(n), top_values(n * m, kNegInf);
  std::vector<int32_t> ranks(n), top_ids(n * m, -1);
  {
    nb::gil_scoped_release release;
    RowView view;
    std::vector<TokenLogprob> top;
    for (size_t i = 0; i < n; ++i) {
      view.reset(logits.data() + static_cast<size_t>(rows[i]) * static_cast<size_t>(width), width, nullptr);
      const TokenLogprob own = logprob(view, ids[i], top_n, top);
      chosen[i] = own.logprob;
      ranks[i] = own.rank;
      for (size_t t = 0; t < top.size(); ++t) {
        top_ids[i * m + t] = static_cast<int32_t>(top[t].id);
        top_values[i * m + t] = top[t].logprob;
      }
    }
  }
  return {to_numpy(std::move(chosen), {n}), to_numpy(std::move(ranks), {n}), to_numpy(std::move(top_ids), {n, m}),
          to_numpy(std::move(top_values), {n, m})};
}

Array<int64_t, 1> argmax(const Logits& logits) {
  std::vector<int64_t> out(logits.shape(0));
  {
    nb::gil_scoped_release release;
    RowView view;
    for (size_t r = 0; r < out.size(); ++r) {
      view.reset(logits.data() + r * logits.shape(1), static_cast<int>(logits.shape(1)), nullptr);
      out[r] = view.argmax();
    }
  }
  const size_t n = out.size();
  return to_numpy(std::move(out), {n});
}

void init_state(SamplingState* self, int vocab_size, const Tokens& prompt, double temperature, int64_t top_k,
                double top_p, double min_p, double repetition_penalty, double presence_penalty,
                double frequency_penalty, const std::vector<std::pair<int64_t, double>>& logit_bias,
                const Tokens& banned, int64_t min_tokens, const Tokens& allowed, const Blocks& bad_words, uint64_t seed,
                uint32_t choice) {
  auto state = std::make_unique<SamplingState>();
  state->vocab_size = vocab_size;
  state->warp = {temperature, top_k, top_p, min_p};
  state->repetition = repetition_penalty;
  state->presence = presence_penalty;
  state->frequency = frequency_penalty;
  for (const auto& [id, value] : logit_bias) {
    state->check(id, "logit_bias");
    state->bias.emplace_back(static_cast<int32_t>(id), static_cast<float>(value));
  }
  for (int64_t id : banned) {
    state->check(id, "banned");
    state->banned.push_back(static_cast<int32_t>(id));
  }
  state->min_tokens = min_tokens;
  for (int64_t id : allowed) {
    state->check(id, "allowed");
    state->allowed.push_back(static_cast<int32_t>(id));
  }
  std::sort(state->allowed.begin(), state->allowed.end());
  state->allowed.erase(std::unique(state->allowed.begin(), state->allowed.end()), state->allowed.end());
  for (const Tokens& word : bad_words) {
    if (word.empty()) fail("bad_words: a word without tokens");
    for (int64_t id : word) state->check(id, "bad_words");
    state->bad_words.emplace_back(word.begin(), word.end());
  }
  state->seed = seed;
  state->choice = choice;
  for (int64_t id : prompt) {
    state->check(id, "prompt");
    state->count_prompt(id);
  }
  new (self) SamplingState(std::move(*state));
}

}  // namespace

void register_sampling(nb::module_& m) {
  nb::class_<IdMap>(m, "IdMap", "Target ids of the columns of a head over part of the vocabulary.")
      .def(
          "__init__",
          [](IdMap* self, Ints ids, int vocab_size) { new (self) IdMap(ids.data(), ids.size(), vocab_size); }, "ids"_a,
          "vocab_size"_a, "ids: int32 [columns], strictly increasing. Raises ValueError.")
      .def("__len__", [](const IdMap& map) { return map.ids.size(); });

  nb::class_<SamplingState>(m, "SamplingState", "Parameters and token counts of one choice of one request.")
      .def(
          "__init__", &init_state, "vocab_size"_a, "prompt"_a, nb::kw_only(), "temperature"_a = 1.0, "top_k"_a = 0,
          "top_p"_a = 1.0, "min_p"_a = 0.0, "repetition_penalty"_a = 1.0, "presence_penalty"_a = 0.0,
          "frequency_penalty"_a = 0.0, "logit_bias"_a = std::vector<std::pair<int64_t, double>>{},
          "banned"_a = Tokens{}, "min_tokens"_a = 0, "allowed"_a = Tokens{}, "bad_words"_a = Blocks{}, "seed"_a = 0,
          "choice"_a = 0,
          "logit_bias: (id, value) pairs. banned: ids masked while the output is shorter than min_tokens. allowed: the "
          "only ids that can be drawn; empty: all. bad_words: token sequences that the output must not hold. top_k 0, "
          "top_p 1 and min_p 0 are off. Raises ValueError for ids outside the vocabulary.")
      .def(
          "commit",
          [](SamplingState& state, const Tokens& tokens) {
            for (int64_t id : tokens) state.check(id, "tokens");
            for (int64_t id : tokens) state.append(id);
          },
          "tokens"_a, "Append tokens to the output.")
      .def(
          "permitted",
          [](SamplingState& state, const Tokens& tokens) {
            Prefix prefix(state);
            size_t count = 0;
            for (; count < tokens.size() && state.permits(tokens[count]); ++count) {
              state.check(tokens[count], "tokens");
              prefix.push(tokens[count]);
            }
            return count;
          },
          "tokens"_a, "How many of these could follow: up to the first that allowed, bad_words or banned rule out.")
      .def_prop_ro("masks", &SamplingState::masks, "Whether any of them rules out ids for the next token.")
      .def_prop_ro("num_tokens", &SamplingState::num_tokens,
                   "Prompt and output: the absolute position of the next draw.")
      .def_ro("num_output", &SamplingState::num_output)
      .def_ro("seed", &SamplingState::seed)
      .def_ro("choice", &SamplingState::choice);

  m.def(
      "argmax_rows", &argmax, "logits"_a,
      "int64 [rows] of float32 [rows, columns]. Ties: lowest column; NaN never wins. A row of NaN and -inf alone gives "
      "its first -inf, or 0.");
  m.def(
      "sample_rows", &sample, "logits"_a, "states"_a, "drafts"_a = Blocks{}, "allowed"_a = nb::none(),
      "pool"_a = nb::none(),
      "The token drawn in every row. logits: float32 [rows, vocabulary], raw; state i owns len(drafts[i]) + 1 rows, "
      "of which row j sees drafts 1..j. Empty drafts: one row each. allowed: int32 [rows, ceil(vocabulary / 32)], "
      "bit i of a row permits id i. pool: its threads share the rows out where that pays. Order: mask, allowed ids, "
      "bad words, min_tokens, logit_bias, penalties, temperature, min_p, top_k, top_p. -1 where masks leave nothing.");
  m.def(
      "draft_rows",
      [](const Logits& logits, const std::vector<SamplingState*>& states, const Tokens& counts, const IdMap* map,
         const std::optional<Ints2>& allowed,
         const Pool& pool) { return draft(logits, states, counts, map, allowed, nullptr, pool); },
      "logits"_a, "states"_a, "counts"_a, "id_map"_a = nb::none(), "allowed"_a = nb::none(), "pool"_a = nb::none(),
      "Tokens (target ids) of a block drafter, drawn with the target's noise: state i owns counts[i] rows, of which "
      "row j sees the tokens drawn in the rows before. pool: as in sample_rows.");
  m.def("draft_rows_with_probs", &draft_with_probs, "logits"_a, "states"_a, "counts"_a, "id_map"_a = nb::none(),
        "allowed"_a = nb::none(),
        "As draft_rows, with the drafter's own noise, and the distributions float32 [rows, columns] drawn from.");
  m.def("probs_rows", &probs, "logits"_a, "states"_a, "drafts"_a = Blocks{}, "allowed"_a = nb::none(),
        "The distributions that sample_rows draws from, float32 [rows, vocabulary].");
  m.def("reject_rows", &reject, "logits"_a, "states"_a, "drafts"_a, "draft_probs"_a = nb::none(),
        "draft_ids"_a = nb::none(), "allowed"_a = nb::none(),
        "Rejection sampling: per state (accepted drafts, next token, -1 as in sample_rows). Rows as there. "
        "draft_probs: float32 "
        "[drafts of all states, m], None = each draft was certain. draft_ids: int32 [1 or drafts, m], the ids of its "
        "columns; None = column is id.");
  m.def("reject_block", &reject_block, "target_probs"_a, "drafts"_a, "uniforms"_a, "draft_probs"_a = nb::none(),
        "draft_ids"_a = nb::none(),
        "The rule behind reject_rows for one block with given distributions [drafts + 1, vocabulary] and uniforms: "
        "(accepted drafts, float32 [vocabulary] distribution of the next token).");
  m.def("logprobs_rows", &logprobs, "logits"_a, "rows"_a, "ids"_a, "top_n"_a = 0,
        "Raw log-softmax of ids[i] in row rows[i] and of the top_n best ids there: (logprobs float32 [n], ranks int32 "
        "[n], ids int32 [n, top_n], logprobs float32 [n, top_n]); id -1 where a row has fewer ids above -inf.");

  m.def(
      "philox4x32_10",
      [](std::vector<uint32_t> counter, std::vector<uint32_t> key) {
        if (counter.size() != 4 || key.size() != 2) fail("counter: 4 words and key: 2 words expected");
        const Words out = philox4x32_10({{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
        return std::vector<uint32_t>(out.w, out.w + 4);
      },
      "counter"_a, "key"_a, "The generator of all noise: 4 words of 32 bits.");
  m.def(
      "gumbel_noise",
      [](uint64_t seed, uint32_t choice, uint32_t position, const Tokens& ids) {
        std::vector<double> out;
        const NoiseKey key(seed, choice, position, Stream::kGumbel);
        for (int64_t id : ids) out.push_back(gumbel(noise_bits(key, static_cast<uint32_t>(id))));
        return out;
      },
      "seed"_a, "choice"_a, "position"_a, "ids"_a, "The noise of coupled sampling.");
  m.def(
      "select_sampling_isa",
      [](const std::string& name) {
        if (!select_kernels(name.c_str()))
          fail("name: '" + name + "' is not available here; use portable, avx2 or avx512");
        return std::string(kernels().name);
      },
      "name"_a = "",
      "Force a path of the sampler for tests (all give the same bits); '' = the one it started with. Returns its "
      "name.");
}
