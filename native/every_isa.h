// Compiles one kernel for every instruction set. Use: #define FERRYMAN_KERNEL "norm.inl", then include this file.
//
// Note [One source, several instruction sets]
// FERRYMAN_KERNEL is included once per set, each time in a namespace of its own, so the sets differ only in what the
// compiler may emit. A kernel file must therefore hold no #include and call no inline function of a library: such a
// function would be emitted with AVX instructions and then merged, by name, with the copy that baseline code calls.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ferryman {

// The dtypes' order is shared with src/ferryman/server/kernels.py.
enum Dtype : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

namespace baseline {
#include "simd.inl"
#include FERRYMAN_KERNEL
}  // namespace baseline

#if defined(__x86_64__)
#define FERRYMAN_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to=function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#include "simd.inl"
#include FERRYMAN_KERNEL
}  // namespace avx2
#undef FERRYMAN_AVX2
#define FERRYMAN_AVX512
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to=function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif
namespace avx512 {
#include "simd.inl"
#include FERRYMAN_KERNEL
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef FERRYMAN_AVX512

// A row of a dispatch table: the same function for every set, in the order of Isa.
#define FERRYMAN_EVERY_ISA(function) {baseline::function, avx2::function, avx512::function}
#else
#define FERRYMAN_EVERY_ISA(function) {baseline::function, baseline::function, baseline::function}
#endif

}  // namespace ferryman
