// A register of floats, as wide as the instruction set allows: loading it from any dtype, storing it, its halves as
// doubles, and arithmetic for which there is no operator. All other arithmetic uses the compiler's own operators, which
// work on all of these types. `split` takes two registers, because AVX2 packs two as cheaply as one.
// No #include here: see Note [One source, several instruction sets].
//
// Functions that end in `_mixed` fill a pair of registers with neighboring elements in another order, which
// `lanes_mixed` returns. In that order no element crosses to the other half of a register, so AVX2 needs half as many
// instructions to unpack and pack narrow numbers.

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
static inline Floats all(float value) { return _mm512_set1_ps(value); }
static inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats square_root(Floats floats) { return _mm512_sqrt_ps(floats); }
static inline Floats sign(Floats floats) {
  const Floats zero = _mm512_setzero_ps();
  const Floats up = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(floats, zero, _CMP_GT_OQ), all(1));
  return _mm512_mask_mov_ps(up, _mm512_cmp_ps_mask(floats, zero, _CMP_LT_OQ), all(-1));
}
static inline void store(float* to, Floats floats) { _mm512_storeu_ps(to, floats); }
static inline void store(Float16* to, Floats floats) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT));
}
static inline Floats join(const Bfloat16* high, const int16_t* low) {
  const __m512i top = _mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(high))), 16);
  const __m512i rest = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
  return _mm512_castsi512_ps(_mm512_add_epi32(top, rest));
}
// Adds one where the lower 16 bits are at least 0x8000, to round. 0x7fff and 0xffff, which are NaNs, do not change.
static inline __m256i round_up(__m256i high, __m256i low) {
  return _mm256_max_epu16(high, _mm256_adds_epi16(high, _mm256_srli_epi16(low, 15)));
}
static inline void split(Bfloat16* high, int16_t* low, Floats floats) {
  const __m512i bits = _mm512_castps_si512(floats);
  const __m256i top = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)), rest = _mm512_cvtepi32_epi16(bits);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), round_up(top, rest));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), rest);
}
static inline void split(Bfloat16* high, int16_t* low, Floats floats, Floats next) {
  split(high, low, floats);
  split(high + 16, low + 16, next);
}

typedef uint32_t Words __attribute__((vector_size(64)));
struct Pair {
  Floats a, b;
};
struct WordPair {
  Words a, b;
};
static inline WordPair lanes_mixed() {
  const Words first = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return {first, first + 16u};
}
static inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline WordPair load_bytes(const uint8_t* from) {
  const __m128i *at = reinterpret_cast<const __m128i*>(from);
  return {reinterpret_cast<Words>(_mm512_cvtepu8_epi32(_mm_loadu_si128(at))),
          reinterpret_cast<Words>(_mm512_cvtepu8_epi32(_mm_loadu_si128(at + 1)))};
}
static inline void store_bytes(uint8_t* to, Words words, Words next) {
  __m128i* const at = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(at, _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(words)));
  _mm_storeu_si128(at + 1, _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(next)));
}
static inline void store_high_mixed(Bfloat16* to, Words words, Words next) {
  const __m512i top = reinterpret_cast<__m512i>(words >> 16), next_top = reinterpret_cast<__m512i>(next >> 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(top));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 16), _mm512_cvtepi32_epi16(next_top));
}

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
static inline Floats all(float value) { return _mm256_set1_ps(value); }
static inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
static inline Floats square_root(Floats floats) { return _mm256_sqrt_ps(floats); }
static inline Floats sign(Floats floats) {
  const Floats zero = _mm256_setzero_ps();
  const Floats up = _mm256_and_ps(_mm256_cmp_ps(floats, zero, _CMP_GT_OQ), all(1));
  return _mm256_or_ps(up, _mm256_and_ps(_mm256_cmp_ps(floats, zero, _CMP_LT_OQ), all(-1)));
}
static inline void store(float* to, Floats floats) { _mm256_storeu_ps(to, floats); }
static inline void store(Float16* to, Floats floats) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT));
}
// Packs sixteen 32-bit words into 16 bits each. No word may be greater than 0xffff.
static inline __m256i pack(__m256i words, __m256i next) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(words, next), 0xd8);  // packing interleaves halves
}
static inline Floats join(const Bfloat16* high, const int16_t* low) {
  const __m256i top =
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high))), 16);
  const __m256i rest = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)));
  return _mm256_castsi256_ps(_mm256_add_epi32(top, rest));
}
// Adds one where the lower 16 bits are at least 0x8000, to round. 0x7fff and 0xffff, which are NaNs, do not change.
static inline __m256i round_up(__m256i high, __m256i low) {
  return _mm256_max_epu16(high, _mm256_adds_epi16(high, _mm256_srli_epi16(low, 15)));
}
static inline void split(Bfloat16* high, int16_t* low, Floats floats, Floats next) {
  const __m256i bits = _mm256_castps_si256(floats), next_bits = _mm256_castps_si256(next);
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const __m256i top = pack(_mm256_srli_epi32(bits, 16), _mm256_srli_epi32(next_bits, 16));
  const __m256i rest = pack(_mm256_and_si256(bits, mask), _mm256_and_si256(next_bits, mask));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), round_up(top, rest));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), rest);
}

typedef uint32_t Words __attribute__((vector_size(32)));
struct Pair {
  Floats a, b;
};
struct WordPair {
  Words a, b;
};
static inline WordPair lanes_mixed() { return {Words{0, 1, 2, 3, 8, 9, 10, 11}, Words{4, 5, 6, 7, 12, 13, 14, 15}}; }
static inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
static inline __m256i load_half_words(const void* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
// Joins the higher and lower halves of sixteen floats.
static inline Pair unpack(__m256i high, __m256i low) {
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(low, high)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(low, high))};
}
static inline __m256i high_half_words(__m256i words, __m256i next) {
  return _mm256_packus_epi32(_mm256_srli_epi32(words, 16), _mm256_srli_epi32(next, 16));
}
static inline Pair mix(Floats a, Floats b) {  // is its own inverse
  return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
}
static inline Pair load_mixed(const Bfloat16* from) { return unpack(load_half_words(from), _mm256_setzero_si256()); }
static inline Pair load_mixed(const float* from) { return mix(load(from), load(from + 8)); }
static inline Pair load_mixed(const Float16* from) { return mix(load(from), load(from + 8)); }
template <class Number>
static inline void store_mixed(Number* to, Pair x) {
  const Pair ordered = mix(x.a, x.b);
  store(to, ordered.a);
  store(to + 8, ordered.b);
}
static inline Pair join_mixed(const Bfloat16* high, const int16_t* low) {
  const __m256i rest = load_half_words(low);
  return unpack(_mm256_add_epi16(load_half_words(high), _mm256_srai_epi16(rest, 15)), rest);
}
static inline void split_mixed(Bfloat16* high, int16_t* low, Pair x) {
  const __m256i a = _mm256_castps_si256(x.a), b = _mm256_castps_si256(x.b), none = _mm256_setzero_si256();
  const __m256i rest = _mm256_packus_epi32(_mm256_blend_epi16(a, none, 0xaa), _mm256_blend_epi16(b, none, 0xaa));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), round_up(high_half_words(a, b), rest));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), rest);
}
static inline void store_high_mixed(Bfloat16* to, Words words, Words next) {
  const __m256i high = high_half_words(reinterpret_cast<__m256i>(words), reinterpret_cast<__m256i>(next));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), high);
}

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
  // A normal number gets the bias of the wider exponent; infinity and NaN get its highest exponent.
  const Words at_top = reinterpret_cast<Words>(exponent == 0x0f800000u);
  const Words normal = magnitude + (112u << 23) + (at_top & (112u << 23));
  // A subnormal becomes the mantissa of 2^-14, which is then subtracted. The result is exact and normalized.
  const Words smallest = Words{} + (113u << 23);
  const Words subnormal = reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude + smallest) -
                                                  reinterpret_cast<Floats>(smallest));
  const Words at_bottom = reinterpret_cast<Words>(exponent == 0u);
  const Words sign = (half & 0x8000u) << 16;
  return reinterpret_cast<Floats>((at_bottom & subnormal) | (~at_bottom & normal) | sign);
}
static inline Doubles low_half(Floats floats) { return Doubles{floats[0], floats[1]}; }
static inline Doubles high_half(Floats floats) { return Doubles{floats[2], floats[3]}; }
static inline Floats all(float value) { return Floats{value, value, value, value}; }
static inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }  // rounds twice: not fused
static inline Floats square_root(Floats floats) {
  for (int i = 0; i < 4; ++i) floats[i] = __builtin_sqrtf(floats[i]);
  return floats;
}
static inline Floats sign(Floats floats) {
  const Words one = reinterpret_cast<Words>(all(1)), minus_one = reinterpret_cast<Words>(all(-1));
  return reinterpret_cast<Floats>((reinterpret_cast<Words>(floats > 0.0f) & one) |
                                  (reinterpret_cast<Words>(floats < 0.0f) & minus_one));
}
static inline void store(float* to, Floats floats) { memcpy(to, &floats, sizeof floats); }
static inline void store_half_words(void* to, Words words) {
  const HalfWords bits = __builtin_convertvector(words & 0xffffu, HalfWords);
  memcpy(to, &bits, sizeof bits);
}
static inline void store(Float16* to, Floats floats) {
  const Words bits = reinterpret_cast<Words>(floats), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  // Normal: change the bias, and round to even by adding just less than half and the lowest bit that is kept.
  const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal: add 0.5, whose last place is that of the smallest float16, so the addition rounds to even.
  const Words half = Words{} + (126u << 23);
  const Words subnormal =
      reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) + reinterpret_cast<Floats>(half)) - half;
  const Words is_subnormal = reinterpret_cast<Words>(magnitude < (113u << 23));
  const Words is_large = reinterpret_cast<Words>(magnitude >= 0x477ff000u);  // rounds to infinity, or is infinite
  const Words is_nan = reinterpret_cast<Words>(magnitude > 0x7f800000u);
  const Words large = 0x7c00u | (is_nan & (0x200u | ((magnitude >> 13) & 0x3ffu)));
  const Words finite = (is_subnormal & subnormal) | (~is_subnormal & normal);
  store_half_words(to, sign | (is_large & large) | (~is_large & finite));
}
static inline Floats join(const Bfloat16* high, const int16_t* low) {
  const Words rest = load_words(low);
  return reinterpret_cast<Floats>((load_words(high) << 16) + ((rest ^ 0x8000u) - 0x8000u));
}
static inline void split(Bfloat16* high, int16_t* low, Floats floats) {
  const Words bits = reinterpret_cast<Words>(floats), top = bits >> 16;
  const Words may_carry = reinterpret_cast<Words>((top & 0x7fffu) != 0x7fffu);  // otherwise a NaN: unchanged
  store_half_words(high, top + ((bits >> 15) & 1u & may_carry));
  store_half_words(low, bits);
}
static inline void split(Bfloat16* high, int16_t* low, Floats floats, Floats next) {
  split(high, low, floats);
  split(high + 4, low + 4, next);
}
typedef uint8_t Bytes __attribute__((vector_size(4)));
struct Pair {
  Floats a, b;
};
struct WordPair {
  Words a, b;
};
static inline WordPair lanes_mixed() { return {Words{0, 1, 2, 3}, Words{4, 5, 6, 7}}; }
static inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
static inline WordPair load_bytes(const uint8_t* from) {
  Bytes bytes, next;
  memcpy(&bytes, from, sizeof bytes);
  memcpy(&next, from + sizeof bytes, sizeof next);
  return {__builtin_convertvector(bytes, Words), __builtin_convertvector(next, Words)};
}
static inline void store_bytes(uint8_t* to, Words words, Words next) {
  const Bytes bytes = __builtin_convertvector(words, Bytes), next_bytes = __builtin_convertvector(next, Bytes);
  memcpy(to, &bytes, sizeof bytes);
  memcpy(to + sizeof bytes, &next_bytes, sizeof next_bytes);
}
static inline void store_high_mixed(Bfloat16* to, Words words, Words next) {
  store_half_words(to, words >> 16);
  store_half_words(to + 4, next >> 16);
}

#endif

constexpr int kWidth = sizeof(Floats) / sizeof(float);

#if !defined(FERRYMAN_AVX2)  // AVX2 has its own versions above

static inline Pair load_mixed(const float* from) { return {load(from), load(from + kWidth)}; }
static inline Pair load_mixed(const Bfloat16* from) { return {load(from), load(from + kWidth)}; }
static inline Pair load_mixed(const Float16* from) { return {load(from), load(from + kWidth)}; }
template <class Number>
static inline void store_mixed(Number* to, Pair x) {
  store(to, x.a);
  store(to + kWidth, x.b);
}
static inline Pair join_mixed(const Bfloat16* high, const int16_t* low) {
  return {join(high, low), join(high + kWidth, low + kWidth)};
}
static inline void split_mixed(Bfloat16* high, int16_t* low, Pair x) { split(high, low, x.a, x.b); }

#endif
