// A register of floats, in the width of the instruction set: how to fill one from any dtype, and its halves as doubles.
// Arithmetic is the compiler's own operators, which work on all of these types.
// No #include here: see Note [One source, several instruction sets].

#if defined(FERRYMAN_AVX512)

typedef __m512 Floats;
typedef __m512d Doubles;

static inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
static inline Floats load(const Bfloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
static inline Floats load(const Float16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
static inline Doubles low_half(Floats floats) { return _mm512_cvtps_pd(_mm512_castps512_ps256(floats)); }
static inline Doubles high_half(Floats floats) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(floats, 1)); }

#elif defined(FERRYMAN_AVX2)

typedef __m256 Floats;
typedef __m256d Doubles;

static inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
static inline Floats load(const Bfloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
static inline Floats load(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
static inline Doubles low_half(Floats floats) { return _mm256_cvtps_pd(_mm256_castps256_ps128(floats)); }
static inline Doubles high_half(Floats floats) { return _mm256_cvtps_pd(_mm256_extractf128_ps(floats, 1)); }

#else

typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint16_t HalfWords __attribute__((vector_size(8)));

static inline Words load_words(const void* from) {
  HalfWords bits;
  memcpy(&bits, from, sizeof bits);
  return __builtin_convertvector(bits, Words);
}
static inline Floats load(const float* from) {
  Floats floats;
  memcpy(&floats, from, sizeof floats);
  return floats;
}
static inline Floats load(const Bfloat16* from) { return reinterpret_cast<Floats>(load_words(from) << 16); }
static inline Floats load(const Float16* from) {
  const Words half = load_words(from);
  const Words magnitude = (half & 0x7fffu) << 13;
  const Words exponent = magnitude & 0x0f800000u;
  // A normal number moves to the wider exponent's bias; infinity and NaN move on to its top.
  const Words at_top = reinterpret_cast<Words>(exponent == 0x0f800000u);
  const Words normal = magnitude + (112u << 23) + (at_top & (112u << 23));
  // A subnormal is placed below a 2^-14 that is then taken away, which leaves it normalised and exact.
  const Words smallest = Words{} + (113u << 23);
  const Words subnormal = reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude + smallest) -
                                                  reinterpret_cast<Floats>(smallest));
  const Words at_bottom = reinterpret_cast<Words>(exponent == 0u);
  const Words sign = (half & 0x8000u) << 16;
  return reinterpret_cast<Floats>((at_bottom & subnormal) | (~at_bottom & normal) | sign);
}
static inline Doubles low_half(Floats floats) { return Doubles{floats[0], floats[1]}; }
static inline Doubles high_half(Floats floats) { return Doubles{floats[2], floats[3]}; }

#endif

constexpr int kWidth = sizeof(Floats) / sizeof(float);
