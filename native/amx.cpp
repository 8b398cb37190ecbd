// Tests whether AMX works here by running its instructions: see src/ferryman/runtime/amx.py.
#include "isa.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

thread_local bool trying = false;
sigjmp_buf escape;

void on_fault(int signal_number) {
  if (trying) siglongjmp(escape, 1);
  signal(signal_number, SIG_DFL);  // a fault of another thread occurs again when this returns, and ends the process
}

// The layout that LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64};
  uint8_t rows[16] = {16, 16, 16};
};

// Written as bytes, because older assemblers do not know the instructions.
void multiply_tiles() {
  const TileConfig config;
  asm volatile(
      ".byte 0xc4, 0xe2, 0x78, 0x49, 0x00\n"  // ldtilecfg [rax]
      ".byte 0xc4, 0xe2, 0x7b, 0x49, 0xc0\n"  // tilezero tmm0
      ".byte 0xc4, 0xe2, 0x7b, 0x49, 0xc8\n"  // tilezero tmm1
      ".byte 0xc4, 0xe2, 0x7b, 0x49, 0xd0\n"  // tilezero tmm2
      ".byte 0xc4, 0xe2, 0x6a, 0x5c, 0xc1\n"  // tdpbf16ps tmm0, tmm1, tmm2
      ".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0\n"  // tilerelease
      :
      : "a"(&config)
      : "memory");
}

}  // namespace

// Asks Linux for permission, once per process; oneDNN asks the same.
FERRYMAN_EXPORT int ferryman_amx_permitted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Whether CPUID reports the size of tiles, which code generators such as oneDNN's use. Some virtual machines run tile
// instructions but hide these leaves; a tile without rows then causes a fault.
FERRYMAN_EXPORT int ferryman_amx_described() {
  constexpr unsigned kTileLeaf = 0x1d, kMultiplyLeaf = 0x1e;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(kTileLeaf, 0, &a, &b, &c, &d) || a == 0) return 0;  // the highest palette
  if (!__get_cpuid_count(kTileLeaf, 1, &a, &b, &c, &d) || a == 0 || b == 0 || c == 0) return 0;  // sizes of palette 1
  return __get_cpuid_count(kMultiplyLeaf, 0, &a, &b, &c, &d) && b != 0;
}

// Runs tile instructions and returns whether they caused no fault. Not reentrant.
FERRYMAN_EXPORT int ferryman_amx_executes() {
  constexpr int kFaults[] = {SIGILL, SIGSEGV};
  struct sigaction probe = {}, saved[2];
  probe.sa_handler = on_fault;
  for (int i = 0; i < 2; ++i) sigaction(kFaults[i], &probe, &saved[i]);
  volatile int executes = 0;
  if (sigsetjmp(escape, 1) == 0) {
    trying = true;
    multiply_tiles();
    executes = 1;
  }
  trying = false;
  for (int i = 0; i < 2; ++i) sigaction(kFaults[i], &saved[i], nullptr);
  return executes;
}

#else

FERRYMAN_EXPORT int ferryman_amx_permitted() { return 0; }
FERRYMAN_EXPORT int ferryman_amx_described() { return 0; }
FERRYMAN_EXPORT int ferryman_amx_executes() { return 0; }

#endif
