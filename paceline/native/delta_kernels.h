// Kernels of the gated delta net (arXiv 2412.06464) and of gated attention, one table per instruction set.
//
// Like kernels.h, this header stays free of inline functions with external linkage.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace paceline {

constexpr int kStateLanes = 32;  // values of one block of a state: it is walked block by block, each in the first cache
constexpr int kMaxKeyDim = 256;

// Causal convolution per channel, then SiLU: of the channels of one head, for the rows of one sequence.
struct ShortConvArgs {
  int rows, width, kernel;
  const float* x;  // [rows, ld_x]
  size_t ld_x;
  const float* history;  // [kernel - 1, ld_history]: the rows before the first, oldest first
  const float* weight;   // [kernel, ld_history], oldest first
  size_t ld_history;
  float scale;  // 0: as it is; else the result is brought to this length, as an L2 norm with eps 1e-6
  float* out;   // [rows, ld_out]
  size_t ld_out;
};

// A copy of the state as it is after the first `rows` rows of a pass.
struct StateCopy {
  int rows;
  float* to;
};

// The recurrence of one value head over the rows of one sequence, row by row:
//   S = decay S;  S += k (beta (v - S^T k))^T;  out = S^T q
struct DeltaRuleArgs {
  int rows, key_dim, value_dim;
  const float* q;  // [rows, ld]; null: only the state is wanted
  const float* k;
  const float* v;
  float* out;  // may be v
  size_t ld;
  const float* decay;  // [rows, ld_gates]
  const float* beta;
  size_t ld_gates;
  float* state;  // [ceil(value_dim / 32)][key_dim][32]
  bool keep;     // the state stays what it is
  const StateCopy* copies;
  int num_copies;
};

// act_out = RMSNorm(x) * weight * silu(z), over the values of one head
struct GatedNormArgs {
  int rows, width;
  const float* x;  // [rows, ld_x]
  size_t ld_x;
  const float* z;  // [rows, ld_z]
  size_t ld_z;
  const float* weight;
  float eps;
  void* out;  // [rows, ld_out], from column `column` on
  size_t ld_out, column;
  Act act;
};

struct DeltaKernels {
  void (*short_conv)(const ShortConvArgs&);
  void (*delta_rule)(const DeltaRuleArgs&);
  void (*gated_norm)(const GatedNormArgs&);
};

// By the name of a path; those with and without bf16 dot products share one.
const DeltaKernels& delta_kernels_for(const char* path);

}  // namespace paceline
