// What the sequential heads of block drafters share: rows of a token table, and how one slot's token is drawn.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <vector>

#include "sampling_draw.h"
#include "sampling_state.h"

namespace paceline {

// A matrix [vocab, width] with a row per token id, fp32 or bf16, in memory that a Python array owns.
class TokenTable {
 public:
  explicit TokenTable(nanobind::object array);
  int vocab() const { return vocab_; }
  int width() const { return width_; }
  void row(int64_t id, float* out) const;

 private:
  nanobind::object owner_;
  const float* f32_ = nullptr;
  const uint16_t* bf16_ = nullptr;
  int vocab_ = 0, width_ = 0;
};

// Sum of a[i] * b[i] in a fixed order.
float dot(const float* a, const float* b, int n);

// The row of logits of one slot, with the request's penalties and biases applied where it has any.
class SlotRow {
 public:
  const sampling::RowView& view(const float* logits, int width, const sampling::IdMap* map,
                                const sampling::SamplingState& state);

 private:
  std::vector<float> scratch_;
  sampling::RowView view_;
};

}  // namespace paceline
