// The checksum of zlib, by carry-less multiplication: several times as fast, so that it hides behind any disk.
//
// After Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ" (Intel, 2009): 64 bytes at a time
// are folded into the next 64, then into 16, then reduced to 32 bits. The constants are powers of x modulo the
// polynomial, reflected, as all of this is.
#include <cstddef>
#include <cstdint>

#include "isa.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define FERRYMAN_CLMUL __attribute__((target("pclmul,sse4.1")))

namespace {

// Byte by byte; `crc` is inverted here as in `fold`.
uint32_t step(const uint8_t* data, size_t count, uint32_t crc) {
  for (size_t i = 0; i < count; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
  }
  return crc;
}

FERRYMAN_CLMUL inline __m128i load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

FERRYMAN_CLMUL inline __m128i fold(__m128i value, __m128i by, __m128i next) {
  return _mm_xor_si128(
      next, _mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00), _mm_clmulepi64_si128(value, by, 0x11)));
}

// `count` is a multiple of 16, and at least 64.
FERRYMAN_CLMUL uint32_t fold_all(const uint8_t* data, size_t count, uint32_t crc) {
  const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i low_half = _mm_setr_epi32(-1, 0, -1, 0);

  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  for (data += 64, count -= 64; count >= 64; data += 64, count -= 64) {
    a = fold(a, by_64, load(data));
    b = fold(b, by_64, load(data + 16));
    c = fold(c, by_64, load(data + 32));
    d = fold(d, by_64, load(data + 48));
  }
  a = fold(a, by_16, b);
  a = fold(a, by_16, c);
  a = fold(a, by_16, d);
  for (; count >= 16; data += 16, count -= 16) a = fold(a, by_16, load(data));

  // 128 bits to 64, to 32 (Barrett's way).
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(a, low_half), _mm_set_epi64x(0, 0x0163cd6124), 0x00));
  const __m128i polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low_half), polynomial, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_half), polynomial, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, quotient), 1));
}

}  // namespace

FERRYMAN_EXPORT int ferryman_has_crc32() {
  return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}

// As zlib's crc32(crc, data, count).
FERRYMAN_EXPORT uint32_t ferryman_crc32(const uint8_t* data, int64_t count, uint32_t crc) {
  size_t left = static_cast<size_t>(count);
  crc = ~crc;
  if (left >= 64) {
    const size_t folded = left & ~static_cast<size_t>(15);
    crc = fold_all(data, folded, crc);
    data += folded;
    left -= folded;
  }
  return ~step(data, left, crc);
}

#else

FERRYMAN_EXPORT int ferryman_has_crc32() { return 0; }
FERRYMAN_EXPORT uint32_t ferryman_crc32(const uint8_t*, int64_t, uint32_t crc) { return crc; }

#endif
