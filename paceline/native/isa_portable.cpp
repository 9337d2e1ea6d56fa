#define PACELINE_KERNELS kPortableKernels
// clang-format off: the kernels are written over the vectors
#include "simd_portable.h"
#include "kernels.inl"
// clang-format on
