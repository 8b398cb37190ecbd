// A register of floats, as wide as the instruction set allows: loading it from any dtype, storing it, its halves as
// doubles, and arithmetic for which there is no operator. All other arithmetic uses the compiler's own operators, which
// work on all of these types. `split` takes two registers, because AVX2 packs two as cheaply as one.
// No #include here: see Note [One source, several instruction sets].
//
// Functions that end in `_mixed` fill a pair of registers with neighbouring elements in another order: those with even
// indices, then those with odd ones. So numbers of 16 bits are unpacked and packed by shifts and masks, which every
// processor executes on several ports, and no element moves to another lane.

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
typedef uint16_t HalfWords __attribute__((vector_size(64)));
struct Pair {
  Floats a, b;
};
static inline Words lanes() { return Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
static inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline float largest(Floats floats) { return _mm512_reduce_max_ps(floats); }
// The lower half of each word, and the upper half of another.
static inline Words blend(Words lower, Words upper) {
  return reinterpret_cast<Words>(_mm512_mask_blend_epi16(0xaaaaaaaa, reinterpret_cast<__m512i>(lower),
                                                         reinterpret_cast<__m512i>(upper)));
}
// Packs the lower halves of words with even and odd indices, or the upper ones, in one instruction.
static inline HalfWords halves(Words even, Words odd, int upper) {
  __m512i order = _mm512_setr_epi32(0x200000, 0x220002, 0x240004, 0x260006, 0x280008, 0x2a000a, 0x2c000c, 0x2e000e,
                                    0x300010, 0x320012, 0x340014, 0x360016, 0x380018, 0x3a001a, 0x3c001c, 0x3e001e);
  order = _mm512_add_epi16(order, _mm512_set1_epi16(static_cast<short>(upper)));
  return reinterpret_cast<HalfWords>(
      _mm512_permutex2var_epi16(reinterpret_cast<__m512i>(even), order, reinterpret_cast<__m512i>(odd)));
}
static inline HalfWords high_half_words(Words even, Words odd) { return halves(even, odd, 1); }
static inline HalfWords low_half_words(Words even, Words odd) { return halves(even, odd, 0); }
// The even and the odd ones of two registers, and the opposite.
static inline Pair mix(Floats a, Floats b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return {_mm512_permutex2var_ps(a, even, b),
          _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b)};
}
static inline Pair unmix(Pair x) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return {_mm512_permutex2var_ps(x.a, first, x.b),
          _mm512_permutex2var_ps(x.a, _mm512_add_epi32(first, _mm512_set1_epi32(8)), x.b)};
}
static inline HalfWords load_bytes(const uint8_t* from) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<HalfWords>(_mm512_cvtepu8_epi16(bytes));
}
static inline void store_bytes(uint8_t* to, HalfWords values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(reinterpret_cast<__m512i>(values)));
}
static inline HalfWords above(HalfWords values, uint16_t least) {
  const __m512i below = _mm512_set1_epi16(static_cast<short>(least));
  return reinterpret_cast<HalfWords>(_mm512_subs_epu16(reinterpret_cast<__m512i>(values), below));
}
static inline HalfWords round_up(HalfWords high, HalfWords low) {
  const __m512i bits = reinterpret_cast<__m512i>(high), carry = reinterpret_cast<__m512i>(low >> 15);
  return reinterpret_cast<HalfWords>(_mm512_max_epu16(bits, _mm512_adds_epi16(bits, carry)));
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
typedef uint16_t HalfWords __attribute__((vector_size(32)));
struct Pair {
  Floats a, b;
};
static inline Words lanes() { return Words{0, 1, 2, 3, 4, 5, 6, 7}; }
static inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
static inline float largest(Floats floats) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(floats), _mm256_extractf128_ps(floats, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// The lower half of each word, and the upper half of another.
static inline Words blend(Words lower, Words upper) {
  return reinterpret_cast<Words>(
      _mm256_blend_epi16(reinterpret_cast<__m256i>(lower), reinterpret_cast<__m256i>(upper), 0xaa));
}
static inline HalfWords high_half_words(Words even, Words odd) {
  return reinterpret_cast<HalfWords>(blend(even >> 16, odd));
}
static inline HalfWords low_half_words(Words even, Words odd) {
  return reinterpret_cast<HalfWords>(blend(even, odd << 16));
}
// The even and the odd ones of two registers, and the opposite.
static inline Floats middle_swapped(Floats floats) {
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(floats), 0xd8));
}
static inline Pair mix(Floats a, Floats b) {
  return {middle_swapped(_mm256_shuffle_ps(a, b, 0x88)), middle_swapped(_mm256_shuffle_ps(a, b, 0xdd))};
}
static inline Pair unmix(Pair x) {
  const Floats low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
static inline HalfWords load_bytes(const uint8_t* from) {
  return reinterpret_cast<HalfWords>(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
static inline void store_bytes(uint8_t* to, HalfWords values) {
  const __m256i bits = reinterpret_cast<__m256i>(values);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
static inline HalfWords above(HalfWords values, uint16_t least) {
  const __m256i below = _mm256_set1_epi16(static_cast<short>(least));
  return reinterpret_cast<HalfWords>(_mm256_subs_epu16(reinterpret_cast<__m256i>(values), below));
}
static inline HalfWords round_up(HalfWords high, HalfWords low) {
  return reinterpret_cast<HalfWords>(round_up(reinterpret_cast<__m256i>(high), reinterpret_cast<__m256i>(low)));
}

#else

typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef uint16_t HalfWords __attribute__((vector_size(16)));
typedef uint16_t FewHalfWords __attribute__((vector_size(8)));

static inline Words load_words(const void* from) {
  FewHalfWords bits;
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
  const FewHalfWords bits = __builtin_convertvector(words & 0xffffu, FewHalfWords);
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
typedef uint8_t Bytes __attribute__((vector_size(8)));
struct Pair {
  Floats a, b;
};
static inline Words lanes() { return Words{0, 1, 2, 3}; }
static inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
static inline float largest(Floats floats) {
  float most = floats[0];
  for (int i = 1; i < 4; ++i) most = floats[i] > most ? floats[i] : most;
  return most;
}
// The lower half of each word, and the upper half of another.
static inline Words blend(Words lower, Words upper) { return (lower & 0xffffu) | (upper & 0xffff0000u); }
static inline HalfWords high_half_words(Words even, Words odd) {
  return reinterpret_cast<HalfWords>(even >> 16 | (odd & 0xffff0000u));
}
static inline HalfWords low_half_words(Words even, Words odd) {
  return reinterpret_cast<HalfWords>((even & 0xffffu) | odd << 16);
}
// The even and the odd ones of two registers, and the opposite.
static inline Pair mix(Floats a, Floats b) { return {Floats{a[0], a[2], b[0], b[2]}, Floats{a[1], a[3], b[1], b[3]}}; }
static inline Pair unmix(Pair x) {
  return {Floats{x.a[0], x.b[0], x.a[1], x.b[1]}, Floats{x.a[2], x.b[2], x.a[3], x.b[3]}};
}
static inline HalfWords load_bytes(const uint8_t* from) {
  Bytes bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, HalfWords);
}
static inline void store_bytes(uint8_t* to, HalfWords values) {
  const Bytes bytes = __builtin_convertvector(values, Bytes);
  memcpy(to, &bytes, sizeof bytes);
}
static inline HalfWords above(HalfWords values, uint16_t least) { return (values > least ? values : least) - least; }
static inline HalfWords round_up(HalfWords high, HalfWords low) {
  const HalfWords may_carry = reinterpret_cast<HalfWords>((high & 0x7fff) != 0x7fff);  // otherwise a NaN
  return high + ((low >> 15) & may_carry);
}

#endif

constexpr int kWidth = sizeof(Floats) / sizeof(float);

static inline Words load_pairs(const void* from) {
  Words words;
  memcpy(&words, from, sizeof words);
  return words;
}
static inline Floats floats_of(Words words) { return reinterpret_cast<Floats>(words); }
static inline Words words_of(Floats floats) { return reinterpret_cast<Words>(floats); }
static inline HalfWords half_words_of(Words words) { return reinterpret_cast<HalfWords>(words); }
// Floats whose lower halves are zero, from their upper halves.
static inline Pair from_high(HalfWords high) {
  const Words words = reinterpret_cast<Words>(high);
  return {floats_of(words << 16), floats_of(words & 0xffff0000u)};
}
static inline Pair load_mixed(const float* from) { return mix(load(from), load(from + kWidth)); }
static inline Pair load_mixed(const Float16* from) { return mix(load(from), load(from + kWidth)); }
static inline Pair load_mixed(const Bfloat16* from) { return from_high(half_words_of(load_pairs(from))); }
template <class Number>
static inline void store_mixed(Number* to, Pair x) {
  const Pair in_order = unmix(x);
  store(to, in_order.a);
  store(to + kWidth, in_order.b);
}
static inline void store_high_mixed(Bfloat16* to, Words even, Words odd) {
  const HalfWords high = high_half_words(even, odd);
  memcpy(to, &high, sizeof high);
}
static inline Pair join_mixed(const Bfloat16* high, const int16_t* low) {
  const Words rest = load_pairs(low);
  // The lower half is signed: it has been carried into the upper one if it is negative.
  const Words top = reinterpret_cast<Words>(half_words_of(load_pairs(high)) - (half_words_of(rest) >> 15));
  return {floats_of(blend(rest, top << 16)), floats_of(blend(rest >> 16, top))};
}
static inline void split_mixed(Bfloat16* high, int16_t* low, Pair x) {
  const Words even = words_of(x.a), odd = words_of(x.b);
  const HalfWords rest = low_half_words(even, odd), top = round_up(high_half_words(even, odd), rest);
  memcpy(high, &top, sizeof top);
  memcpy(low, &rest, sizeof rest);
}
