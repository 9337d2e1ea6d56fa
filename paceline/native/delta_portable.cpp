#define PACELINE_DELTA_KERNELS kPortableDelta
// clang-format off: the kernels are written over the vectors
#include "simd_portable.h"
#include "delta_kernels.inl"
// clang-format on
