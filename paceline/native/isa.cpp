// Chooses the kernels once per process.
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"

namespace paceline {

const char* best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) return "avx512_bf16";
  if (avx512) return "avx512";
  if (avx2) return "avx2";
#endif
  return "portable";
}

bool far_prefetch_pays() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  const bool amd = __get_cpuid(0, &a, &b, &c, &d) && c == signature_AMD_ecx;
  return amd && __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 15) + (a >> 20 & 255) == 0x19;
#else
  return false;
#endif
}

const Kernels& kernels_for(const char* name) {
  // each path includes the ones before it, so a path runs here if it is not past the best
  static const char* const order[] = {"portable", "avx2", "avx512", "avx512_bf16"};
  static const Kernels* const tables[] = {
      &kPortableKernels,
#if defined(__x86_64__)
      &kAvx2Kernels,
      &kAvx512Kernels,
      &kAvx512Bf16Kernels,
#endif
  };
  const std::string best = best_isa();
  const char* env = std::getenv("PACELINE_ISA");
  const std::string want = name && *name ? name : env && *env ? env : best;
  for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); ++i) {
    if (want == order[i]) return *tables[i];
    if (best == order[i]) break;
  }
  throw std::runtime_error("'" + want + "' is not a path this processor can run; the best here is '" + best +
                           "' (paths: portable, avx2, avx512, avx512_bf16)");
}

}  // namespace paceline
