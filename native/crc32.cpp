// The CRC-32 of zlib, by carry-less multiplication: several times as fast as zlib, and faster than disks.
//
// After Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ" (Intel, 2009): 64 bytes at a time
// are folded into the next 64, then into 16, then reduced to 32 bits. If one instruction multiplies two pairs, 128 bytes
// are folded at a time. All polynomials are bit-reflected; the constants are powers of x modulo the polynomial.
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "isa.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define FERRYMAN_CLMUL __attribute__((target("pclmul,sse4.1")))
#define FERRYMAN_WIDE_CLMUL __attribute__((target("pclmul,sse4.1,avx2,vpclmulqdq")))

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

FERRYMAN_CLMUL inline __m128i by_16() { return _mm_set_epi64x(0x00ccaa009e, 0x01751997d0); }

// Folds all complete blocks of 64 bytes into 16; the rest of the data is left.
FERRYMAN_CLMUL __m128i fold_by_64(const uint8_t*& data, size_t& count, uint32_t crc) {
  const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  for (data += 64, count -= 64; count >= 64; data += 64, count -= 64) {
    a = fold(a, by_64, load(data));
    b = fold(b, by_64, load(data + 16));
    c = fold(c, by_64, load(data + 32));
    d = fold(d, by_64, load(data + 48));
  }
  for (const __m128i next : {b, c, d}) a = fold(a, by_16(), next);
  return a;
}

FERRYMAN_WIDE_CLMUL inline __m256i load_wide(const uint8_t* data) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

FERRYMAN_WIDE_CLMUL inline __m256i fold_wide(__m256i value, __m256i by, __m256i next) {
  return _mm256_xor_si256(
      next, _mm256_xor_si256(_mm256_clmulepi64_epi128(value, by, 0x00), _mm256_clmulepi64_epi128(value, by, 0x11)));
}

// The same with blocks of 128 bytes.
FERRYMAN_WIDE_CLMUL __m128i fold_by_128(const uint8_t*& data, size_t& count, uint32_t crc) {
  const __m256i by_128 = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x014a7fe880, 0x01e88ef372));
  const __m128i start = _mm_cvtsi32_si128(static_cast<int>(crc));
  __m256i a = _mm256_xor_si256(load_wide(data), _mm256_zextsi128_si256(start));
  __m256i b = load_wide(data + 32), c = load_wide(data + 64), d = load_wide(data + 96);
  for (data += 128, count -= 128; count >= 128; data += 128, count -= 128) {
    a = fold_wide(a, by_128, load_wide(data));
    b = fold_wide(b, by_128, load_wide(data + 32));
    c = fold_wide(c, by_128, load_wide(data + 64));
    d = fold_wide(d, by_128, load_wide(data + 96));
  }
  __m128i all = fold(_mm256_castsi256_si128(a), by_16(), _mm256_extracti128_si256(a, 1));
  for (const __m256i next : {b, c, d}) {
    all = fold(all, by_16(), _mm256_castsi256_si128(next));
    all = fold(all, by_16(), _mm256_extracti128_si256(next, 1));
  }
  return all;
}

// Reduces 128 bits to 64 and then to 32 (Barrett reduction).
FERRYMAN_CLMUL uint32_t reduce(__m128i a) {
  const __m128i low_half = _mm_setr_epi32(-1, 0, -1, 0);
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16(), 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(a, low_half), _mm_set_epi64x(0, 0x0163cd6124), 0x00));
  const __m128i polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low_half), polynomial, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_half), polynomial, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, quotient), 1));
}

}  // namespace

// The vector width that this CPU supports: 2 (VPCLMULQDQ), 1 (PCLMULQDQ) or 0 (neither).
FERRYMAN_EXPORT int ferryman_crc32_width() {
  if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq") ? 2 : 1;
}

// Like zlib's crc32(crc, data, count). `width` must not exceed ferryman_crc32_width().
FERRYMAN_EXPORT FERRYMAN_CLMUL uint32_t ferryman_crc32(const uint8_t* data, int64_t count, uint32_t crc, int width) {
  size_t left = static_cast<size_t>(count);
  crc = ~crc;
  if (left >= 128) {
    __m128i folded = width > 1 ? fold_by_128(data, left, crc) : fold_by_64(data, left, crc);
    for (; left >= 16; data += 16, left -= 16) folded = fold(folded, by_16(), load(data));
    crc = reduce(folded);
  }
  return ~step(data, left, crc);
}

#else

FERRYMAN_EXPORT int ferryman_crc32_width() { return 0; }
FERRYMAN_EXPORT uint32_t ferryman_crc32(const uint8_t*, int64_t, uint32_t crc, int) { return crc; }

#endif
