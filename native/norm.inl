// The sum of squares of one block. No #include here: see Note [One source, several instruction sets].
//
// There are sixteen partial sums, whatever the width of a register, and they are added in a fixed order at the end.
// Squares of floats are exact in double. So every instruction set gives the same bits.

constexpr int kSums = 16;
constexpr int kRegisters = kSums / kWidth;

template <class Number>
static inline void add_squares(const Number* numbers, Doubles* sums) {
  for (int i = 0; i < kRegisters; ++i) {
    const Floats floats = load(numbers + i * kWidth);
    const Doubles low = low_half(floats), high = high_half(floats);
    sums[2 * i] += low * low;
    sums[2 * i + 1] += high * high;
  }
}

template <class Number>
static inline double sum_of_squares(const void* data, int64_t count) {
  const Number* numbers = static_cast<const Number*>(data);
  Doubles sums[2 * kRegisters] = {};
  for (; count >= kSums; count -= kSums, numbers += kSums) add_squares(numbers, sums);
  Number rest[kSums] = {};
  memcpy(rest, numbers, count * sizeof(Number));
  add_squares(rest, sums);

  double scalars[kSums];
  memcpy(scalars, sums, sizeof scalars);
  double total = 0;
  for (double scalar : scalars) total += scalar;
  return total;
}

static double sum_of_squares_float32(const void* data, int64_t count) { return sum_of_squares<float>(data, count); }
static double sum_of_squares_bfloat16(const void* data, int64_t count) { return sum_of_squares<Bfloat16>(data, count); }
static double sum_of_squares_float16(const void* data, int64_t count) { return sum_of_squares<Float16>(data, count); }
