#if defined(__x86_64__)
#define PACELINE_KERNELS kAvx512Kernels
// clang-format off: the kernels are written over the vectors
#include "simd_avx512.h"
#include "kernels.inl"
// clang-format on
#endif
