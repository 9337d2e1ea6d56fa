// Chooses the kernels once per process.
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "amx.h"
#include "kernels.h"

namespace paceline {
namespace {

#if defined(__x86_64__)
unsigned vendor() {  // a part of its name: the signature_*_ecx of cpuid.h
  unsigned a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) ? c : 0;
}

const char* ask_for_amx() {
  unsigned a, b, c, d;
  constexpr unsigned bits = 1u << 24 | 1u << 22 | 1u << 25;  // amx-tile, amx-bf16, amx-int8
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & bits) != bits) return "the processor has no AMX";
#if defined(PACELINE_AMX) && defined(__linux__)
  uint32_t low, high;
  constexpr uint32_t states = 1u << 17 | 1u << 18;  // tile configuration, tile data
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM of Linux 5.16
  if ((low & states) != states || syscall(SYS_arch_prctl, request, tile_data) != 0)
    return "the processor has AMX, but the system does not let this process use it";
  return nullptr;
#elif defined(__linux__)
  return "the processor has AMX, but the compiler of this build could not use it";
#else
  return "the processor has AMX, which is used on Linux only";
#endif
}

#if defined(PACELINE_AMX)
const Kernels& amx_kernels() {
  static const Kernels kernels = [] {
    Kernels k = kAvx512Bf16Kernels;
    k.name = "amx";
    k.query_tile = kMaxQueryTile;
    k.gemm = amx_gemm;
    k.attend = amx_attend;
    k.finish = amx_finish;
    k.peak_loop = amx_peak_loop;
    return k;
  }();
  return kernels;
}
#endif
#endif

}  // namespace

const char* amx_refused() {
#if defined(__x86_64__)
  static const char* const reason = ask_for_amx();
  return reason;
#else
  return "the processor has no AMX";
#endif
}

const char* best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"))
    return amx_refused() ? "avx512_bf16" : "amx";
  if (avx512) return "avx512";
  if (avx2) return "avx2";
#endif
  return "portable";
}

// Measured on a Xeon of the fourth generation: a bf16 dot product is issued every fourth cycle, two fused
// multiply-adds, each half as much, every cycle. On Zen 4 it is the other way round, and faster on Zen 5.
const char* default_isa() {
  const std::string best = best_isa();
#if defined(__x86_64__)
  if (best == "avx512_bf16" && vendor() == signature_INTEL_ecx) return "avx512";
#endif
  return best_isa();
}

int far_prefetch_rows() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (vendor() == signature_INTEL_ecx) return __builtin_cpu_supports("avx512bf16") ? 1 : 0;
  const bool zen4 =
      vendor() == signature_AMD_ecx && __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 15) + (a >> 20 & 255) == 0x19;
  return zen4 ? 6 : 0;
#else
  return 0;
#endif
}

const Kernels& kernels_for(const char* name) {
  // each path includes the ones before it, so a path runs here if it is not past the best
  static const char* const order[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};
  static const Kernels* const tables[] = {
      &kPortableKernels,
#if defined(__x86_64__)
      &kAvx2Kernels,     &kAvx512Kernels, &kAvx512Bf16Kernels,
#if defined(PACELINE_AMX)
      &amx_kernels(),
#endif
#endif
  };
  const std::string best = best_isa();
  const char* env = std::getenv("PACELINE_ISA");
  const std::string want = name && *name ? name : env && *env ? env : default_isa();
  for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); ++i) {
    if (want == order[i]) return *tables[i];
    if (best == order[i]) break;
  }
  const std::string why = want == "amx" && best == "avx512_bf16" ? std::string(": ") + amx_refused() : "";
  throw std::runtime_error("'" + want + "' is not a path this processor can run" + why + "; the best here is '" + best +
                           "' (paths: portable, avx2, avx512, avx512_bf16, amx)");
}

}  // namespace paceline
