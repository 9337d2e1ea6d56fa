#define PACELINE_KERNELS kPortableKernels
#include "kernels.inl"
#include "simd_portable.h"
