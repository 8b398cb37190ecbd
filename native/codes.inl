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
constexpr uint16_t kLowest = 111 << 7;  // the upper half of 2^-16

static inline Pair decode_signed(const uint8_t* from) {
  const HalfWords code = load_bytes(from), size = (code & 0x7f) << 4;
  const HalfWords bits = size + kLowest + ((code & 0x80) << 8);
  return from_high(size != 0 ? bits : HalfWords{});
}
static inline Pair decode_root(const uint8_t* from) { return from_high((load_bytes(from) << 3) + kLowest); }
static inline void encode_signed(uint8_t* to, Pair values) {
  const HalfWords bits = high_half_words(words_of(values.a), words_of(values.b));
  store_bytes(to, above(bits & 0x7fff, kLowest - 8) >> 4 | (bits >> 8 & 0x80));
}
static inline void encode_root(uint8_t* to, Pair values) {
  store_bytes(to, above(high_half_words(words_of(values.a), words_of(values.b)), kLowest - 4) >> 3);
}

static inline Floats size_of(Floats values) {
  return reinterpret_cast<Floats>(reinterpret_cast<Words>(values) & 0x7fffffffu);
}
static inline Pair size_of(Pair values) { return {size_of(values.a), size_of(values.b)}; }
static inline Pair maximum(Pair x, Pair y) { return {maximum(x.a, y.a), maximum(x.b, y.b)}; }
static inline float largest(Pair values) { return largest(maximum(values.a, values.b)); }
