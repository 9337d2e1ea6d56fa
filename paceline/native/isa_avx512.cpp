#if defined(__x86_64__)
#define PACELINE_KERNELS kAvx512Kernels
#include "simd_avx512.h"
#include "kernels.inl"
#endif
