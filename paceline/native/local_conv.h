// DFlash 2's local convolution over the rows of a draft block.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paceline {

// out_i = sum over taps t of (base[t, c] + delta_i[t, c / group]) * y_{i - t}, where y is the input row, or its RMSNorm
// when `norm` is given, and rows before a sequence's first are zero. With `add`, the result is added to out.
struct LocalConvArgs {
  const float* in;  // [rows, ld_in]
  size_t ld_in;
  const float* delta;  // [rows, ld_delta], from its first used column on: [kernel, width / group]
  size_t ld_delta;
  const float* base;  // [kernel, width]
  const float* norm;  // [width] or null
  float eps;
  int width, kernel, group;
  bool add;
  float* out;  // [rows, ld_out]
  size_t ld_out;
};

// Rows [begin, end) of a batch whose sequences start at rows starts[0..sequences].
void local_conv(const LocalConvArgs& args, const int32_t* starts, int sequences, int begin, int end);

}  // namespace paceline
