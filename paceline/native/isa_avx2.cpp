#if defined(__x86_64__)
#define PACELINE_KERNELS kAvx2Kernels
#include "kernels.inl"
#include "simd_avx2.h"
#endif
