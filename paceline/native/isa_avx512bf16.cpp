#if defined(__x86_64__)
#define PACELINE_BF16_DOT 1
#define PACELINE_KERNELS kAvx512Bf16Kernels
// clang-format off: the kernels are written over the vectors
#include "simd_avx512.h"
#include "kernels.inl"
// clang-format on
#endif
