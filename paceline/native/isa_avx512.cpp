#if defined(__x86_64__)
#define PACELINE_KERNELS kAvx512Kernels
#include "kernels.inl"
#include "simd_avx512.h"
#endif
