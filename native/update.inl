// The optimizers' rules, one pass over a piece of a unit: the gradient comes in, state and weights change.
// No #include here: see Note [One source, several instruction sets].
//
// Each rule does what torch's own does, operation by operation, with a fused multiply-add where torch's vector code has
// one: so states equal torch's to the last bit, and weights but for torch's square root, which is not rounded exactly.

// Two registers side by side. Each operation waits for the one before it, square root and divisions the longest: with
// two at a time a core has something to do in between.
struct Pair {
  Floats a, b;
};
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

// What the weights are: float32 themselves, or a narrow working copy beside the float32 master.
struct Plain {
  typedef float Weight;
  typedef float Master;
  static inline Pair read(const float* weights, const float*) { return load_pair(weights); }
  static inline void write(float* weights, float*, Pair values) { store(weights, values); }
};

// bfloat16, and the 16 bits that it lacks: high = (bits + 0x8000) >> 16, low = bits - (high << 16), which are the lower
// bits themselves. A NaN stays one in both forms: where the sum would carry it on to zero, high is bits >> 16.
struct Split {
  typedef Bfloat16 Weight;
  typedef int16_t Master;
  static inline Pair read(const Bfloat16* weights, const int16_t* master) {
    return {join(weights, master), join(weights + kWidth, master + kWidth)};
  }
  static inline void write(Bfloat16* weights, int16_t* master, Pair values) {
    split(weights, master, values.a, values.b);
  }
};

struct Half {
  typedef Float16 Weight;
  typedef float Master;
  static inline Pair read(const Float16*, const float* master) { return load_pair(master); }
  static inline void write(Float16* weights, float* master, Pair values) {
    store(weights, values);
    store(master, values);
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

// With momentum; `fresh` where there is none yet.
struct MomentumRule {
  static constexpr int kStates = 1;
  Pair coupled, momentum, undamped, step_size;
  bool couples, nesterov, fresh;
  explicit MomentumRule(const float* h)
      : coupled(each(h[2])), momentum(each(h[3])), undamped(each(h[4])), step_size(each(h[6])), couples(h[2] != 0.0f),
        nesterov(h[5] != 0.0f), fresh(h[7] != 0.0f) {}
  inline void operator()(Pair& weight, Pair gradient, Pair* state) const {
    if (couples) gradient = multiply_add(weight, coupled, gradient);
    state[0] = fresh ? gradient : multiply_add(gradient, undamped, state[0] * momentum);
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
  static constexpr int kStates = 1;
  Pair decay, beta1, beta1_rest, beta2, beta2_rest, step_size;
  explicit LionRule(const float* h)
      : decay(each(h[1])), beta1(each(h[2])), beta1_rest(each(h[3])), beta2(each(h[4])), beta2_rest(each(h[5])),
        step_size(each(h[6])) {}
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

template <class Rule, class Number, class Form>
static inline void update_pair(const Rule& rule, Pair factor, const Number* gradient,
                               typename Form::Weight* weights, typename Form::Master* master, float* first,
                               float* second) {
  float* const states[2] = {first, second};
  Pair state[2];
  for (int i = 0; i < Rule::kStates; ++i) state[i] = load_pair(states[i]);
  Pair weight = Form::read(weights, master);
  rule(weight, load_pair(gradient) * factor, state);
  for (int i = 0; i < Rule::kStates; ++i) store(states[i], state[i]);
  Form::write(weights, master, weight);
}

// How many elements ahead memory is asked for what comes next: with up to five streams, each in pages of its own, the
// processor does not foresee it all. Nothing beyond a piece is read: to ask is not to read.
constexpr int kAhead = 128;

template <class Rule, class Number, class Form>
__attribute__((flatten)) static void update(const Piece& piece) {
  typedef typename Form::Weight Weight;
  typedef typename Form::Master Master;
  const Rule rule(piece.hyper);
  const Pair factor = each(piece.hyper[0]);
  const Number* gradient = static_cast<const Number*>(piece.gradient);
  Weight* weights = static_cast<Weight*>(piece.weights);
  Master* master = static_cast<Master*>(piece.master);
  float *first = piece.first, *second = piece.second;
  int64_t left = piece.count;
  for (; left >= kPair; left -= kPair) {
    __builtin_prefetch(gradient + kAhead);
    __builtin_prefetch(weights + kAhead, 1);
    if (master) __builtin_prefetch(master + kAhead, 1);
    if (Rule::kStates > 0) __builtin_prefetch(first + kAhead, 1);
    if (Rule::kStates > 1) __builtin_prefetch(second + kAhead, 1);
    update_pair<Rule, Number, Form>(rule, factor, gradient, weights, master, first, second);
    gradient += kPair;
    weights += kPair;
    if (master) master += kPair;
    if (Rule::kStates > 0) first += kPair;
    if (Rule::kStates > 1) second += kPair;
  }
  if (left == 0) return;
  // The rest, in memory of its own: nothing beyond the piece is read or written.
  Number rest_gradient[kPair] = {};
  Weight rest_weights[kPair] = {};
  Master rest_master[kPair] = {};
  float rest_first[kPair] = {}, rest_second[kPair] = {};
  memcpy(rest_gradient, gradient, left * sizeof(Number));
  memcpy(rest_weights, weights, left * sizeof(Weight));
  if (master) memcpy(rest_master, master, left * sizeof(Master));
  if (Rule::kStates > 0) memcpy(rest_first, first, left * sizeof(float));
  if (Rule::kStates > 1) memcpy(rest_second, second, left * sizeof(float));
  update_pair<Rule, Number, Form>(rule, factor, rest_gradient, rest_weights, rest_master, rest_first, rest_second);
  memcpy(weights, rest_weights, left * sizeof(Weight));
  if (master) memcpy(master, rest_master, left * sizeof(Master));
  if (Rule::kStates > 0) memcpy(first, rest_first, left * sizeof(float));
  if (Rule::kStates > 1) memcpy(second, rest_second, left * sizeof(float));
}

// By the gradient's dtype, then by the weights': both in the order of Dtype.
typedef void (*Update)(const Piece&);
#define FERRYMAN_FORMS(Rule, Number) \
  {update<Rule, Number, Plain>, update<Rule, Number, Split>, update<Rule, Number, Half>}
#define FERRYMAN_RULE(Rule) \
  {FERRYMAN_FORMS(Rule, float), FERRYMAN_FORMS(Rule, Bfloat16), FERRYMAN_FORMS(Rule, Float16)}
static inline Update update_for(int rule, int gradient, int weights) {
  static constexpr Update kTable[5][3][3] = {FERRYMAN_RULE(AdamRule), FERRYMAN_RULE(MomentumRule),
                                             FERRYMAN_RULE(DescentRule), FERRYMAN_RULE(LionRule),
                                             FERRYMAN_RULE(AdagradRule)};
  return kTable[rule][gradient][weights];
}
#undef FERRYMAN_FORMS
#undef FERRYMAN_RULE
