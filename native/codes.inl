// The codes of moments in eight bits. Part of update.inl.
//
// Note [Eight bits]
// A moment takes one byte, relative to the largest of its block of 256, which is exact. A code consists of some of the
// bits of a float32. Its lowest exponent stands for 2^-16. Values are rounded to nearest.
// - A moment with a sign: sign, 4 bits of exponent, 3 of mantissa. The lowest code is zero.
// - The second moment of Adam: its square root, 4 bits of exponent and 4 of mantissa, which cover a range of 2^32. No
//   code is zero, so an update never divides by zero where other moments of the block are not zero.
// A block whose largest value is too small for a scale is all zeros.
constexpr float kTopSigned = 0.9375f, kTopRoot = 0.96875f;  // the highest codes
constexpr float kNoneSigned = 0x1p-90f, kNoneRoot = 0x1p-110f;

// All bits of a code are in the upper half of a float.
constexpr int kLowest = 111 << 7;  // the upper half of 2^-16

#if defined(FERRYMAN_AVX2)

static inline Pair from_high(__m256i half_words) { return unpack(half_words, _mm256_setzero_si256()); }
static inline __m256i to_high(Pair x) { return high_half_words(_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)); }
static inline __m128i sixteen(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
static inline void store_bytes(uint8_t* to, __m256i half_words) {
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(half_words), _mm256_extracti128_si256(half_words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
static inline Pair decode_signed(const uint8_t* from) {
  const __m256i code = _mm256_slli_epi16(_mm256_cvtepi8_epi16(sixteen(from)), 4);
  const __m256i bits = _mm256_and_si256(code, _mm256_set1_epi16(static_cast<short>(0x87f0)));
  const __m256i is_zero = _mm256_cmpeq_epi16(_mm256_add_epi16(bits, bits), _mm256_setzero_si256());
  return from_high(_mm256_andnot_si256(is_zero, _mm256_add_epi16(bits, _mm256_set1_epi16(kLowest))));
}
static inline Pair decode_root(const uint8_t* from) {
  const __m256i code = _mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen(from)), 3);
  return from_high(_mm256_add_epi16(code, _mm256_set1_epi16(kLowest)));
}
static inline void encode_signed(uint8_t* to, Pair values) {
  const __m256i bits = to_high(values), size = _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff));
  const __m256i code = _mm256_srli_epi16(_mm256_subs_epu16(size, _mm256_set1_epi16(kLowest - 8)), 4);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(bits, 8), _mm256_set1_epi16(0x80));
  store_bytes(to, _mm256_or_si256(code, sign));
}
static inline void encode_root(uint8_t* to, Pair values) {
  store_bytes(to, _mm256_srli_epi16(_mm256_subs_epu16(to_high(values), _mm256_set1_epi16(kLowest - 4)), 3));
}

#else

static inline Floats from_high(Words half_words) { return reinterpret_cast<Floats>(half_words << 16); }
static inline Words decoded_signed(Words code) {
  const Words size = code & 0x7fu, is_zero = reinterpret_cast<Words>(size == 0u);
  return ((size << 4) + static_cast<uint32_t>(kLowest) + ((code & 0x80u) << 8)) & ~is_zero;
}
static inline Pair decode_signed(const uint8_t* from) {
  const WordPair codes = load_bytes(from);
  return {from_high(decoded_signed(codes.a)), from_high(decoded_signed(codes.b))};
}
static inline Pair decode_root(const uint8_t* from) {
  const WordPair codes = load_bytes(from);
  return {from_high((codes.a << 3) + static_cast<uint32_t>(kLowest)),
          from_high((codes.b << 3) + static_cast<uint32_t>(kLowest))};
}
static inline Words above(Words bits, uint32_t least) {  // the difference, or zero if it is negative
  return (bits - least) & reinterpret_cast<Words>(bits > least);
}
static inline Words encoded_signed(Floats values) {
  const Words bits = reinterpret_cast<Words>(values) >> 16;
  return (above(bits & 0x7fffu, kLowest - 8) >> 4 & 0x7fu) | ((bits >> 8) & 0x80u);
}
static inline Words encoded_root(Floats values) {
  return above(reinterpret_cast<Words>(values) >> 16, kLowest - 4) >> 3 & 0xffu;
}
static inline void encode_signed(uint8_t* to, Pair values) {
  store_bytes(to, encoded_signed(values.a), encoded_signed(values.b));
}
static inline void encode_root(uint8_t* to, Pair values) {
  store_bytes(to, encoded_root(values.a), encoded_root(values.b));
}

#endif

static inline Floats size_of(Floats values) {
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(values) & 0x7fffffffu);
}
static inline Pair size_of(Pair values) { return {size_of(values.a), size_of(values.b)}; }
static inline Pair maximum(Pair x, Pair y) { return {maximum(x.a, y.a), maximum(x.b, y.b)}; }
static inline float largest(Pair values) {
  float found[kWidth], most = 0;
  store(found, maximum(values.a, values.b));
  for (float value : found) most = value > most ? value : most;
  return most;
}
