// The instruction sets that the kernels are compiled for. The order is shared with src/ferryman/runtime/native.py.
#pragma once

#define FERRYMAN_EXPORT extern "C" __attribute__((visibility("default")))

namespace ferryman {

enum Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// The widest set that this CPU has and this system saves on a context switch.
Isa best_isa();

}  // namespace ferryman
