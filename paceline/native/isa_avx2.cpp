#if defined(__x86_64__)
#define PACELINE_KERNELS kAvx2Kernels
// clang-format off: the kernels are written over the vectors
#include "simd_avx2.h"
#include "kernels.inl"
// clang-format on
#endif
