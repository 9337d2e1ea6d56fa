#include "draft_heads.h"

#include <cstring>
#include <stdexcept>

namespace nb = nanobind;

namespace paceline {

TokenTable::TokenTable(nb::object array) : owner_(std::move(array)) {
  using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  using Halves = nb::ndarray<const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  Floats f;
  Halves h;
  if (nb::try_cast(owner_, f, false)) {  // as it is: bits of halves would convert to numbers
    f32_ = f.data();
    vocab_ = int(f.shape(0));
    width_ = int(f.shape(1));
  } else if (nb::try_cast(owner_, h, false)) {
    bf16_ = h.data();
    vocab_ = int(h.shape(0));
    width_ = int(h.shape(1));
  } else {
    throw std::invalid_argument("table: expected float32 or uint16 (bfloat16 bits) [vocabulary, width], C-contiguous");
  }
  if (width_ < 1) throw std::invalid_argument("table: rows are empty");
}

void TokenTable::row(int64_t id, float* out) const {
  const size_t at = size_t(id) * size_t(width_);
  if (f32_ != nullptr) {
    std::memcpy(out, f32_ + at, size_t(width_) * sizeof(float));
    return;
  }
  for (int i = 0; i < width_; ++i) {
    const uint32_t bits = uint32_t(bf16_[at + size_t(i)]) << 16;
    std::memcpy(out + i, &bits, sizeof bits);
  }
}

float dot(const float* a, const float* b, int n) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  for (int l = 0; i < n; ++i, ++l) lanes[l] += a[i] * b[i];
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int l = 0; l < step; ++l) lanes[l] += lanes[l + step];
  return lanes[0];
}

const sampling::RowView& SlotRow::view(const float* logits, int width, const sampling::IdMap* map,
                                       const sampling::SamplingState& state) {
  if (state.processes()) {
    scratch_.assign(logits, logits + width);
    state.process(scratch_.data(), map);
    logits = scratch_.data();
  }
  view_.reset(logits, width, map == nullptr ? nullptr : map->ids.data());
  return view_;
}

}  // namespace paceline
