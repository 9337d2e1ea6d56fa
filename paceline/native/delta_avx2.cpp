#if defined(__x86_64__)
#define PACELINE_DELTA_KERNELS kAvx2Delta
// clang-format off: the kernels are written over the vectors
#include "simd_avx2.h"
#include "delta_kernels.inl"
// clang-format on
#endif
