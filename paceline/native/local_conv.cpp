#include "local_conv.h"

#include <algorithm>
#include <cmath>

namespace paceline {
namespace {

// 1 / sqrt(mean(x^2) + eps), summed in a fixed order.
float inverse_rms(const float* x, int width, float eps) {
  double lanes[8] = {};
  int i = 0;
  for (; i + 8 <= width; i += 8)
    for (int l = 0; l < 8; ++l) lanes[l] += double(x[i + l]) * double(x[i + l]);
  for (int l = 0; i < width; ++i, ++l) lanes[l] += double(x[i]) * double(x[i]);
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return float(1.0 / std::sqrt(sum / width + double(eps)));
}

}  // namespace

void local_conv(const LocalConvArgs& a, const int32_t* starts, int sequences, int begin, int end) {
  const int groups = a.width / a.group;
  int sequence = 0;
  for (int row = begin; row < end; ++row) {
    while (sequence + 1 < sequences && starts[sequence + 1] <= row) ++sequence;
    float* out = a.out + size_t(row) * a.ld_out;
    if (!a.add) std::fill(out, out + a.width, 0.0f);
    const float* delta = a.delta + size_t(row) * a.ld_delta;
    for (int tap = 0; tap < a.kernel && row - tap >= starts[sequence]; ++tap) {
      const float* in = a.in + size_t(row - tap) * a.ld_in;
      const float* base = a.base + size_t(tap) * size_t(a.width);
      const float scale = a.norm == nullptr ? 1.0f : inverse_rms(in, a.width, a.eps);
      for (int g = 0; g < groups; ++g) {
        const float change = delta[tap * groups + g];
        for (int c = g * a.group; c < (g + 1) * a.group; ++c) {
          const float y = a.norm == nullptr ? in[c] : in[c] * scale * a.norm[c];
          out[c] += (base[c] + change) * y;
        }
      }
    }
  }
}

}  // namespace paceline
