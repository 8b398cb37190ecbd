#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ferryman {

Isa best_isa() {
#if defined(__x86_64__)
  // The builtin also checks whether the system saves the wide registers. Older compilers do not know F16C.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kBaseline;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return kAvx512;
  return kAvx2;
#else
  return kBaseline;
#endif
}

}  // namespace ferryman

FERRYMAN_EXPORT int ferryman_best_isa() { return ferryman::best_isa(); }
