#define PACELINE_KERNELS kPortableKernels
#include "simd_portable.h"
#include "kernels.inl"
