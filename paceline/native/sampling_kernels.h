// Vector kernels of the sampler. Every instruction-set variant returns the same bits: integer work and maxima are
// exact, and floating-point sums keep 16 fixed lanes whatever the width of a register.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampling_math.h"

namespace paceline::sampling {

constexpr int kBlock = 64;  // ids per block; a row's last block is padded with -inf (see RowView)

struct Kernels {
  const char* name;
  // maxima[b] = maximum of block b of x; NaN never wins, an all-NaN block gives -inf. Returns the largest.
  float (*block_maxima)(const float* x, int blocks, float* maxima);
  // Bit i: x[i] >= threshold, for one block.
  uint64_t (*mask_ge)(const float* x, float threshold);
  // lanes[l] += sum over ids i = l (mod 16) of exp((x[i] - top) * scale): fp32 terms, added in order in double. Blocks
  // whose terms all vanish are skipped, which changes nothing.
  void (*sum_exp)(const float* x, const float* maxima, int blocks, float top, float scale, double* lanes);
  // out[i] = the same fp32 exp, for one block.
  void (*exp_block)(const float* x, float top, float scale, float* out);
  // The first block b in [begin, end) with an id whose score may reach `threshold`, or `end`: bit i of *mask says that
  // an upper bound of (x[i] - top) * scale + gumbel(words[i]) of that block reaches it; words = the block's 64 random
  // words.
  int (*scan_noise)(const float* x, const float* maxima, int begin, int end, const NoiseKey& key, float top,
                    float scale, float threshold, uint32_t* words, uint64_t* mask);
  // The random words of 64 given ids.
  void (*noise_ids)(const int32_t* ids, const NoiseKey& key, uint32_t* words);
  // The mask of scan_noise for one block of given logits and words.
  uint64_t (*bound_mask)(const float* x, const uint32_t* words, float top, float scale, float threshold);
};

// The variant in use: the best this CPU has, or what select_kernels chose.
const Kernels& kernels();
// "portable", "avx2" or "avx512"; "" = what PACELINE_ISA says, else the best. False if this CPU or build lacks it.
bool select_kernels(const char* name);

}  // namespace paceline::sampling
