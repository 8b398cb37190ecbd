// The optimizers' rules, one pass over a piece of a unit: the gradient comes in, state and weights change.
// No #include of a library here: see Note [One source, several instruction sets].
//
// Each rule performs the same operations as torch's own, with a fused multiply-add where torch's vector code has one.
// So states equal torch's bitwise. Weights can differ, because torch's square root is not correctly rounded.

// A pair is two registers. Each operation waits for the result of the one before it, longest for square roots and
// divisions. With two registers at a time, a core can work on one while it waits for the other.
constexpr int kPair = 2 * kWidth;

static inline Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }
static inline Pair operator-(Pair x, Pair y) { return {x.a - y.a, x.b - y.b}; }
static inline Pair operator*(Pair x, Pair y) { return {x.a * y.a, x.b * y.b}; }
static inline Pair operator/(Pair x, Pair y) { return {x.a / y.a, x.b / y.b}; }
static inline Pair multiply_add(Pair x, Pair y, Pair z) {
  return {multiply_add(x.a, y.a, z.a), multiply_add(x.b, y.b, z.b)};
}
static inline Pair square_root(Pair x) { return {square_root(x.a), square_root(x.b)}; }
static inline Pair sign(Pair x) { return {sign(x.a), sign(x.b)}; }
static inline Pair each(float value) { return {all(value), all(value)}; }
template <class Number>
static inline Pair load_pair(const Number* from) {
  return {load(from), load(from + kWidth)};
}
template <class Number>
static inline void store(Number* to, Pair x) {
  store(to, x.a);
  store(to + kWidth, x.b);
}

// The weights: float32, or a narrow working copy with a float32 master.
struct Plain {
  static constexpr bool kHasMaster = false;
  typedef float Weight;
  typedef float Master;
  static inline Pair read(const float* weights, const float*) { return load_pair(weights); }
  static inline void write(float* weights, float*, Pair values) { store(weights, values); }
  static inline Pair read_mixed(const float* weights, const float*) { return load_mixed(weights); }
  static inline void write_mixed(float* weights, float*, Pair values) { store_mixed(weights, values); }
};

// bfloat16, and the 16 bits that it lacks: high = (bits + 0x8000) >> 16, low = bits - (high << 16), which are the lower
// bits themselves. A NaN stays one in both forms: where the sum would carry it on to zero, high is bits >> 16.
struct Split {
  static constexpr bool kHasMaster = true;
  typedef Bfloat16 Weight;
  typedef int16_t Master;
  static inline Pair read(const Bfloat16* weights, const int16_t* master) {
    return {join(weights, master), join(weights + kWidth, master + kWidth)};
  }
  static inline void write(Bfloat16* weights, int16_t* master, Pair values) {
    split(weights, master, values.a, values.b);
  }
  static inline Pair read_mixed(const Bfloat16* weights, const int16_t* master) { return join_mixed(weights, master); }
  static inline void write_mixed(Bfloat16* weights, int16_t* master, Pair values) {
    split_mixed(weights, master, values);
  }
};

struct Half {
  static constexpr bool kHasMaster = true;
  typedef Float16 Weight;
  typedef float Master;
  static inline Pair read(const Float16*, const float* master) { return load_pair(master); }
  static inline void write(Float16* weights, float* master, Pair values) {
    store(weights, values);
    store(master, values);
  }
  static inline Pair read_mixed(const Float16*, const float* master) { return load_mixed(master); }
  static inline void write_mixed(Float16* weights, float* master, Pair values) {
    store_mixed(weights, values);
    store_mixed(master, values);
  }
};

// Adam and AdamW.
struct AdamRule {
  static constexpr int kStates = 2;
  Pair decay, coupled, beta1_rest, beta2, beta2_rest, step_size, correction, epsilon;
  bool couples, near;
  explicit AdamRule(const float* h)
      : decay(each(h[1])), coupled(each(h[2])), beta1_rest(each(h[3] < 0.5f ? h[3] : h[3] - 1.0f)), beta2(each(h[4])),
        beta2_rest(each(h[5])), step_size(each(h[6])), correction(each(h[7])), epsilon(each(h[8])),
        couples(h[2] != 0.0f), near(h[3] < 0.5f) {}
  inline void operator()(Pair& weight, Pair gradient, Pair* state) const {
    weight = weight * decay;
    if (couples) gradient = multiply_add(weight, coupled, gradient);
    Pair& first = state[0];
    Pair& second = state[1];
    const Pair way = gradient - first;
    first = near ? multiply_add(beta1_rest, way, first) : multiply_add(beta1_rest, way, gradient);
    second = multiply_add(beta2_rest * gradient, gradient, second * beta2);
    weight = weight + (step_size * first) / (square_root(second) / correction + epsilon);
  }
};

// Rules for states that are rounded have a fourth argument: the root of the state kRoot, which is what eight bits
// keep of it. They multiply the gradient by its factor themselves, and expect states that have been multiplied by `keep`,
// because decoding multiplies states anyway.

// Adam and AdamW for moments that are rounded: fewer operations, since the result cannot equal torch's bitwise anyway.
// What is the same for all elements is multiplied beforehand.
struct ShortAdamRule {
  static constexpr int kStates = 2, kRoot = 1;
  float keep[2];
  Pair factor, decay, coupled, beta1_rest, beta2_rest, step_size, epsilon;
  bool couples;
  explicit ShortAdamRule(const float* h)
      : keep{1.0f - h[3], h[4]}, factor(each(h[0])), decay(each(h[1])), coupled(each(h[2])),
        step_size(each(h[6] * h[7])), epsilon(each(h[8] * h[7])), couples(h[2] != 0.0f) {
    const float given = couples ? 1.0f : h[0];
    beta1_rest = each(h[3] * given);
    beta2_rest = each(__builtin_sqrtf(h[5]) * given);
  }
  inline void operator()(Pair& weight, Pair gradient, Pair* state, Pair& root) const {
    weight = weight * decay;
    if (couples) gradient = multiply_add(weight, coupled, gradient * factor);
    state[0] = multiply_add(beta1_rest, gradient, state[0]);
    const Pair part = beta2_rest * gradient;
    state[1] = multiply_add(part, part, state[1]);
    root = square_root(state[1]);
    weight = weight + (step_size * state[0]) / (root + epsilon);
  }
};

// With momentum; `fresh` if there is none yet.
struct MomentumRule {
  static constexpr int kStates = 1, kRoot = -1;
  float keep[1];
  Pair factor, coupled, momentum, undamped, step_size;
  bool couples, nesterov, fresh;
  explicit MomentumRule(const float* h)
      : keep{h[3]}, factor(each(h[0])), coupled(each(h[2])), momentum(each(h[3])), undamped(each(h[4])),
        step_size(each(h[6])), couples(h[2] != 0.0f), nesterov(h[5] != 0.0f), fresh(h[7] != 0.0f) {}
  inline void operator()(Pair& weight, Pair gradient, Pair* state, Pair&) const {
    after_decay(weight, gradient * factor, state);
  }
  inline void operator()(Pair& weight, Pair gradient, Pair* state) const {
    state[0] = state[0] * momentum;
    after_decay(weight, gradient, state);
  }
  inline void after_decay(Pair& weight, Pair gradient, Pair* state) const {
    if (couples) gradient = multiply_add(weight, coupled, gradient);
    state[0] = fresh ? gradient : multiply_add(gradient, undamped, state[0]);
    const Pair direction = nesterov ? multiply_add(state[0], momentum, gradient) : state[0];
    weight = multiply_add(direction, step_size, weight);
  }
};

struct DescentRule {
  static constexpr int kStates = 0;
  Pair coupled, step_size;
  bool couples;
  explicit DescentRule(const float* h) : coupled(each(h[2])), step_size(each(h[6])), couples(h[2] != 0.0f) {}
  inline void operator()(Pair& weight, Pair gradient, Pair*) const {
    if (couples) gradient = multiply_add(weight, coupled, gradient);
    weight = multiply_add(gradient, step_size, weight);
  }
};

struct LionRule {
  static constexpr int kStates = 1, kRoot = -1;
  static constexpr float keep[1] = {1};  // it decays in two ways
  Pair factor, decay, beta1, beta1_rest, beta2, beta2_rest, step_size;
  explicit LionRule(const float* h)
      : factor(each(h[0])), decay(each(h[1])), beta1(each(h[2])), beta1_rest(each(h[3])), beta2(each(h[4])),
        beta2_rest(each(h[5])), step_size(each(h[6])) {}
  inline void operator()(Pair& weight, Pair gradient, Pair* state, Pair&) const {
    (*this)(weight, gradient * factor, state);
  }
  inline void operator()(Pair& weight, Pair gradient, Pair* state) const {
    const Pair direction = sign(multiply_add(gradient, beta1_rest, state[0] * beta1));
    weight = multiply_add(direction, step_size, weight * decay);
    state[0] = multiply_add(gradient, beta2_rest, state[0] * beta2);
  }
};

struct AdagradRule {
  static constexpr int kStates = 1;
  Pair coupled, step_size, epsilon;
  bool couples;
  explicit AdagradRule(const float* h)
      : coupled(each(h[2])), step_size(each(h[6])), epsilon(each(h[8])), couples(h[2] != 0.0f) {}
  inline void operator()(Pair& weight, Pair gradient, Pair* state) const {
    if (couples) gradient = multiply_add(weight, coupled, gradient);
    state[0] = multiply_add(gradient, gradient, state[0]);
    weight = weight + (step_size * gradient) / (square_root(state[0]) + epsilon);
  }
};

// Pointers to the arrays of a piece, from some element on.
template <class Rule, class Number, class Form, class Code>
struct Stretch {
  const Number* gradient = nullptr;
  typename Form::Weight* weights = nullptr;
  typename Form::Master* master = nullptr;
  Code* states[2] = {nullptr, nullptr};

  Stretch() {}
  explicit Stretch(const Piece& piece)
      : gradient(static_cast<const Number*>(piece.gradient)),
        weights(static_cast<typename Form::Weight*>(piece.weights)),
        master(static_cast<typename Form::Master*>(piece.master)),
        states{static_cast<Code*>(piece.first), static_cast<Code*>(piece.second)} {}
  // The same from a later element on. An index that all arrays share costs less than five pointers that move.
  inline Stretch from(int64_t index) const {
    Stretch later = *this;
    later.gradient += index;
    later.weights += index;
    if (Form::kHasMaster) later.master += index;
    for (int i = 0; i < Rule::kStates; ++i) later.states[i] += index;
    return later;
  }
  inline void prefetch() const {
    __builtin_prefetch(gradient);
    __builtin_prefetch(weights, 1);
    if (Form::kHasMaster) __builtin_prefetch(master, 1);
    for (int i = 0; i < Rule::kStates; ++i) __builtin_prefetch(states[i], 1);
  }
};

// A copy of the end of a piece, so that nothing beyond the piece is read or written.
template <class Rule, class Number, class Form, class Code, int kLength>
struct Rest {
  Number gradient[kLength] = {};
  typename Form::Weight weights[kLength] = {};
  typename Form::Master master[kLength] = {};
  Code states[2][kLength] = {};
  Stretch<Rule, Number, Form, Code> here;

  Rest(const Stretch<Rule, Number, Form, Code>& from, int64_t count) {
    memcpy(gradient, from.gradient, count * sizeof(Number));
    memcpy(weights, from.weights, count * sizeof(weights[0]));
    if (Form::kHasMaster) memcpy(master, from.master, count * sizeof(master[0]));
    for (int i = 0; i < Rule::kStates; ++i) memcpy(states[i], from.states[i], count * sizeof(Code));
    here.gradient = gradient;
    here.weights = weights;
    here.master = master;
    for (int i = 0; i < 2; ++i) here.states[i] = states[i];
  }
  inline void give(const Stretch<Rule, Number, Form, Code>& to, int64_t count) const {
    memcpy(to.weights, weights, count * sizeof(weights[0]));
    if (Form::kHasMaster) memcpy(to.master, master, count * sizeof(master[0]));
    for (int i = 0; i < Rule::kStates; ++i) memcpy(to.states[i], states[i], count * sizeof(Code));
  }
};

// How many elements ahead memory is prefetched. With up to five streams in different pages, the processor's own
// prefetcher does not follow all of them. Prefetching beyond the end of a piece is harmless, since it does not read.
constexpr int kAhead = 128;
constexpr int kLine = 32;  // numbers of 16 bits in a cache line

// States in float32.
template <class Rule, class Number, class Form>
static inline void update_pair(const Rule& rule, Pair factor, const Stretch<Rule, Number, Form, float>& at) {
  Pair state[2];
  for (int i = 0; i < Rule::kStates; ++i) state[i] = load_pair(at.states[i]);
  Pair weight = Form::read(at.weights, at.master);
  rule(weight, load_pair(at.gradient) * factor, state);
  for (int i = 0; i < Rule::kStates; ++i) store(at.states[i], state[i]);
  Form::write(at.weights, at.master, weight);
}

template <class Rule, class Number, class Form>
__attribute__((flatten)) static void update(const Piece& piece) {
  const Rule rule(piece.numbers->hyper);
  const Pair factor = each(piece.numbers->hyper[0]);
  const Stretch<Rule, Number, Form, float> at(piece);
  int64_t done = 0;
  for (; done + kPair <= piece.count; done += kPair) {
    at.from(done + kAhead).prefetch();
    update_pair(rule, factor, at.from(done));
  }
  if (const int64_t left = piece.count - done) {
    Rest<Rule, Number, Form, float, kPair> rest(at.from(done), left);
    update_pair(rule, factor, rest.here);
    rest.give(at.from(done), left);
  }
}

// States in bfloat16, rounded up with the probability that preserves the mean. The noise is a function of the step
// (through the keys) and of the element's index in its tensor, so it depends neither on threads nor on how tensors are
// cut. torch code computes the same (src/ferryman/server/moments.py). Each state uses half of the bits of one word.
struct Noise {
  Words a, b;
  uint32_t key;
  Noise(const Piece& piece) : key(piece.numbers->keys[1]) {
    a = (2 * lanes() + static_cast<uint32_t>(piece.index)) * 0x9e3779b1u + piece.numbers->keys[0];
    b = a + 0x9e3779b1u;
  }
  inline void advance() {
    a += kPair * 0x9e3779b1u;
    b += kPair * 0x9e3779b1u;
  }
  inline Words mixed(Words x) const {
    x = (x ^ (x >> 16)) * key;
    return x ^ (x >> 15);
  }
};

// Infinity, and the NaNs that arithmetic produces, have zeros in their lower half, so rounding does not change them.
static inline Words rounded(Floats values, Words noise) { return reinterpret_cast<Words>(values) + noise; }

template <class Rule, class Number, class Form>
static inline void update_noisy_pair(const Rule& rule, const Stretch<Rule, Number, Form, Bfloat16>& at,
                                     const Noise& noise) {
  Pair state[2], root;
  for (int i = 0; i < Rule::kStates; ++i) state[i] = load_mixed(at.states[i]) * each(rule.keep[i]);
  Pair weight = Form::read_mixed(at.weights, at.master);
  rule(weight, load_mixed(at.gradient), state, root);
  const Words a = noise.mixed(noise.a), b = noise.mixed(noise.b);
  store_high_mixed(at.states[0], rounded(state[0].a, a & 0xffffu), rounded(state[0].b, b & 0xffffu));
  if (Rule::kStates > 1) store_high_mixed(at.states[1], rounded(state[1].a, a >> 16), rounded(state[1].b, b >> 16));
  Form::write_mixed(at.weights, at.master, weight);
}

template <class Rule, class Number, class Form>
__attribute__((flatten)) static void update_noisy(const Piece& piece) {
  const Rule rule(piece.numbers->hyper);
  const Stretch<Rule, Number, Form, Bfloat16> at(piece);
  Noise noise(piece);
  int64_t done = 0;
  for (; done + kLine <= piece.count; done += kLine) {
    at.from(done + kAhead).prefetch();
    for (int i = 0; i < kLine; i += kPair) {
      update_noisy_pair(rule, at.from(done + i), noise);
      noise.advance();
    }
  }
  for (; done < piece.count; done += kPair) {
    const int64_t left = piece.count - done < kPair ? piece.count - done : kPair;
    Rest<Rule, Number, Form, Bfloat16, kPair> rest(at.from(done), left);
    update_noisy_pair(rule, rest.here, noise);
    rest.give(at.from(done), left);
    noise.advance();
  }
}

// States in eight bits.
#include "codes.inl"

// The new moments of a block. They can be encoded only when the largest of them are known. That is done during the next
// block's square roots and divisions, for which a core has to wait anyway.
template <class Rule>
struct Pending {
  static constexpr int kPairs = kBlock / kPair;
  Pair kept[Rule::kStates][kPairs], by[Rule::kStates];
  uint8_t* codes[Rule::kStates];
  inline void encode(int n) const {
    for (int i = 0; i < Rule::kStates; ++i) {
      if (i == Rule::kRoot)
        encode_root(codes[i] + n * kPair, kept[i][n] * by[i]);
      else
        encode_signed(codes[i] + n * kPair, kept[i][n] * by[i]);
    }
  }
};

template <bool kHasBefore, class Rule, class Number, class Form>
static inline void update_block(const Rule& rule, const Stretch<Rule, Number, Form, uint8_t>& at, float* const* scales,
                                Pending<Rule>& now, const Pending<Rule>& before) {
  Pair most[Rule::kStates], scale[Rule::kStates];
  for (int i = 0; i < Rule::kStates; ++i) {
    most[i] = each(0);
    scale[i] = each((i == Rule::kRoot ? __builtin_sqrtf(rule.keep[i]) : rule.keep[i]) * *scales[i]);
    now.codes[i] = at.states[i];
  }
  for (int n = 0; n < Pending<Rule>::kPairs; ++n) {
    if (n % (kLine / kPair) == 0) at.from(kBlock + n * kPair).prefetch();
    const Stretch<Rule, Number, Form, uint8_t> here = at.from(n * kPair);
    Pair state[2], root;
    for (int i = 0; i < Rule::kStates; ++i) {
      state[i] = (i == Rule::kRoot ? decode_root(here.states[i]) : decode_signed(here.states[i])) * scale[i];
      if (i == Rule::kRoot) state[i] = state[i] * state[i];
    }
    Pair weight = Form::read_mixed(here.weights, here.master);
    rule(weight, load_mixed(here.gradient), state, root);
    if (kHasBefore) before.encode(n);
    Form::write_mixed(here.weights, here.master, weight);
    for (int i = 0; i < Rule::kStates; ++i) {
      now.kept[i][n] = i == Rule::kRoot ? root : state[i];
      most[i] = maximum(most[i], i == Rule::kRoot ? root : size_of(state[i]));
    }
  }
  for (int i = 0; i < Rule::kStates; ++i) {
    const bool is_root = i == Rule::kRoot;
    const float top = is_root ? kTopRoot : kTopSigned, found = largest(most[i]);
    const bool none = !(found > (is_root ? kNoneRoot : kNoneSigned));
    now.by[i] = each(none ? 0.0f : top / found);
    *scales[i] = none ? 0.0f : found / top;
  }
}

// A piece begins with a block; its last block may be shorter.
template <class Rule, class Number, class Form>
__attribute__((flatten)) static void update_coded(const Piece& piece) {
  const Rule rule(piece.numbers->hyper);
  const Stretch<Rule, Number, Form, uint8_t> at(piece);
  float* scales[2] = {piece.first_scales, piece.second_scales};
  Pending<Rule> pending[2];
  int64_t done = 0;
  int turn = 0;
  for (; done + kBlock <= piece.count; done += kBlock, turn ^= 1) {
    if (done > 0)
      update_block<true>(rule, at.from(done), scales, pending[turn], pending[turn ^ 1]);
    else
      update_block<false>(rule, at, scales, pending[turn], pending[turn ^ 1]);
    for (int i = 0; i < Rule::kStates; ++i) ++scales[i];
  }
  if (done > 0)
    for (int n = 0; n < Pending<Rule>::kPairs; ++n) pending[turn ^ 1].encode(n);
  if (const int64_t left = piece.count - done) {
    Rest<Rule, Number, Form, uint8_t, kBlock> rest(at.from(done), left);
    update_block<false>(rule, rest.here, scales, pending[0], pending[1]);
    for (int n = 0; n < Pending<Rule>::kPairs; ++n) pending[0].encode(n);
    rest.give(at.from(done), left);
  }
}

// By the states' format, the rule, the gradient's dtype, the weights': in the order of Format, of Dtype, and of Dtype.
typedef void (*Update)(const Piece&);
#define FERRYMAN_FORMS(update, Rule, Number) \
  {update<Rule, Number, Plain>, update<Rule, Number, Split>, update<Rule, Number, Half>}
#define FERRYMAN_RULE(update, Rule) \
  {FERRYMAN_FORMS(update, Rule, float), FERRYMAN_FORMS(update, Rule, Bfloat16), FERRYMAN_FORMS(update, Rule, Float16)}
#define FERRYMAN_COMPACT(update) \
  {FERRYMAN_RULE(update, ShortAdamRule), FERRYMAN_RULE(update, MomentumRule), {}, FERRYMAN_RULE(update, LionRule), {}}
static inline Update update_for(int format, int rule, int gradient, int weights) {
  static constexpr Update kTable[3][5][3][3] = {
      {FERRYMAN_RULE(update, AdamRule), FERRYMAN_RULE(update, MomentumRule), FERRYMAN_RULE(update, DescentRule),
       FERRYMAN_RULE(update, LionRule), FERRYMAN_RULE(update, AdagradRule)},
      FERRYMAN_COMPACT(update_noisy),
      FERRYMAN_COMPACT(update_coded)};
  return kTable[format][rule][gradient][weights];
}
#undef FERRYMAN_FORMS
#undef FERRYMAN_RULE
#undef FERRYMAN_COMPACT
