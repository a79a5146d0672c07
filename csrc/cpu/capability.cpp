#include "cpu/capability.h"

#include <cstdlib>
#include <string_view>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specdec::cpu {
namespace {

#ifdef __x86_64__
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Linux gives a process the tile registers only after it has asked for them.
bool may_use_amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

Capability widest() {
#ifdef __x86_64__
  const char* variable = std::getenv("SPECDEC_CPU_CAPABILITY");
  const std::string_view asked = variable == nullptr ? "" : variable;
  __builtin_cpu_init();
  if (asked == "plain" || !has_avx2()) return Capability::kPlain;
  if (asked == "avx2" || !has_avx512()) return Capability::kAvx2;
  if (asked == "avx512" || !__builtin_cpu_supports("avx512bf16")) return Capability::kAvx512;
  if (asked == "avx512_bf16" || !may_use_amx()) return Capability::kAvx512Bf16;
  return Capability::kAmxBf16;
#else
  return Capability::kPlain;
#endif
}

}  // namespace

Capability capability() {
  static const Capability chosen = widest();
  return chosen;
}

}  // namespace specdec::cpu
