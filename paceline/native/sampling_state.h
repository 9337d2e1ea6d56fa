// What the sampler remembers of a request between passes: parameters, token counts, the drafter's id list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sampling_filters.h"
#include "sampling_math.h"

namespace paceline::sampling {

// Throws std::invalid_argument: a caller's mistake.
[[noreturn]] void fail(const std::string& message);

// A drafter's reduced vocabulary: column -> target id, strictly increasing, and back.
struct IdMap {
  std::vector<int32_t> ids;
  std::vector<int32_t> columns;  // per target id: its column, or -1

  IdMap(const int32_t* list, size_t count, int vocab_size);
  int column(int64_t id) const { return columns[static_cast<size_t>(id)]; }
};

// What one choice of one request needs for every draw. Counts follow the committed tokens; a block's drafts are counted
// for the length of a native call only (Prefix below), so there is nothing to roll back.
class SamplingState {
 public:
  int vocab_size = 0;
  Warp warp;
  double repetition = 1, presence = 0, frequency = 0;
  std::vector<std::pair<int32_t, float>> bias;
  std::vector<int32_t> banned;  // end-of-sequence and stop ids, masked while output is shorter than min_tokens
  int64_t min_tokens = 0;
  uint64_t seed = 0;
  uint32_t choice = 0;
  int64_t num_prompt = 0, num_output = 0;

  bool penalised() const { return repetition != 1 || presence != 0 || frequency != 0; }
  int64_t num_tokens() const { return num_prompt + num_output; }
  // The noise of the next draw, or of one so many tokens later.
  NoiseKey noise(Stream stream, int64_t later = 0) const {
    return NoiseKey(seed, choice, static_cast<uint32_t>(num_tokens() + later), stream);
  }

  // Throws if `id` lies outside the vocabulary; `what` names the argument.
  void check(int64_t id, const char* what) const;
  void count_prompt(int64_t id) {
    ++num_prompt;
    if (penalised()) entries_[slot(id)].prompt = true;
  }
  void count_output(int64_t id, int by) {
    num_output += by;
    if (penalised()) entries_[slot(id)].output += by;
  }

  // True if `process` changes the next row.
  bool processes() const { return penalised() || !bias.empty() || (!banned.empty() && num_output < min_tokens); }

  // Order of vLLM's sampler: min_tokens, logit_bias, then repetition, frequency and presence penalty. num_output
  // already includes the drafts before this row.
  void process(float* x, const IdMap* map) const;

 private:
  struct Entry {
    int32_t id;
    int32_t output;
    bool prompt;
  };
  std::vector<Entry> entries_;  // distinct ids seen, in order of appearance
  std::vector<int32_t> slots_;  // per id: its entry, or -1; allocated for penalised requests alone

  size_t slot(int64_t id);
};

// Counts a block's tokens on top of a state and takes them off again.
class Prefix {
 public:
  explicit Prefix(SamplingState& state) : state_(state) {}
  Prefix(const Prefix&) = delete;
  Prefix& operator=(const Prefix&) = delete;
  ~Prefix() {
    for (int64_t id : tokens_) state_.count_output(id, -1);
  }
  void push(int64_t id) {
    tokens_.push_back(id);
    state_.count_output(id, 1);
  }

 private:
  SamplingState& state_;
  std::vector<int64_t> tokens_;
};

}  // namespace paceline::sampling
