#define PACELINE_BF16_DOT 1
#if defined(__x86_64__)
#define PACELINE_KERNELS kAvx512Bf16Kernels
#include "kernels.inl"
#include "simd_avx512.h"
#endif
