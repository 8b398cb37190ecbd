#include <cstdint>

namespace ferryman {

// The layouts of both structures are shared with src/ferryman/runtime/native.py.

// What is the same for many pieces, and other in each step.
struct Numbers {
  float hyper[10];   // by rule; the first is what the gradient is multiplied by
  uint32_t keys[2];  // of the noise with which moments are rounded to bfloat16
};

// A range of one tensor, with its gradient and state.
struct Piece {
  int64_t count;
  const void* gradient;
  void* weights;  // the working copy
  void* master;   // what float32 has beyond it: the low 16 bits (bfloat16), a float32 copy (float16), nothing (float32)
  void* first;    // the optimizer's state, or nothing
  void* second;
  float* first_scales;  // in eight bits: one for each block
  float* second_scales;
  int64_t index;  // of the first element in its tensor
  const Numbers* numbers;
  int32_t gradient_dtype;
  int32_t weight_dtype;
  int32_t format;  // of the state
};

constexpr int64_t kBlock = 256;  // elements of a moment in eight bits that share a scale

enum Format : int { kWide = 0, kNoisy = 1, kCoded = 2 };  // float32, bfloat16, eight bits

}  // namespace ferryman

#define FERRYMAN_KERNEL "update.inl"
#include "every_isa.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace ferryman {
namespace {

// Blocks are large compared to the cost of taking one, and because long sequential reads are faster. Each thread gets
// several blocks, so that no thread waits long for the last one.
constexpr int64_t kSmallestBlock = 1 << 14, kLargestBlock = 1 << 18, kBlocksPerThread = 8;

int64_t elements_of(const Piece* pieces, int64_t count) {
  int64_t elements = 0;
  for (int64_t i = 0; i < count; ++i) elements += pieces[i].count;
  return elements;
}

constexpr int kMasterWidth[] = {0, 2, 4};  // by the weights' dtype
constexpr int kStateWidth[] = {4, 2, 1};   // by the format

Piece cut(const Piece& whole, int64_t start, int64_t count) {
  Piece piece = whole;
  piece.count = count;
  piece.gradient = static_cast<const char*>(whole.gradient) + start * (whole.gradient_dtype == kFloat32 ? 4 : 2);
  piece.weights = static_cast<char*>(whole.weights) + start * (whole.weight_dtype == kFloat32 ? 4 : 2);
  if (whole.master) piece.master = static_cast<char*>(whole.master) + start * kMasterWidth[whole.weight_dtype];
  const int64_t state = start * kStateWidth[whole.format];
  if (whole.first) piece.first = static_cast<char*>(whole.first) + state;
  if (whole.second) piece.second = static_cast<char*>(whole.second) + state;
  if (whole.first_scales) piece.first_scales = whole.first_scales + start / kBlock;
  if (whole.second_scales) piece.second_scales = whole.second_scales + start / kBlock;
  piece.index = whole.index + start;
  return piece;
}

using UpdateFor = void (*(*)(int, int, int, int))(const Piece&);
constexpr UpdateFor kUpdateFor[] = FERRYMAN_EVERY_ISA(update_for);

}  // namespace
}  // namespace ferryman

// Elementwise, or by blocks: the result depends neither on the number of threads nor on where pieces begin. `moved`: how
// many bytes further all gradients are than the pieces say.
FERRYMAN_EXPORT int ferryman_update(int rule, const ferryman::Piece* pieces, int64_t count, int64_t moved, int isa,
                                    int threads) {
  using namespace ferryman;
  const int64_t elements = elements_of(pieces, count);
  // Many small tensors are no work for several threads: waking one takes longer than updating a small block.
  threads = static_cast<int>(std::clamp<int64_t>(elements / kSmallestBlock, 1, threads));
  const int64_t most = std::clamp(elements / (threads * kBlocksPerThread), kSmallestBlock, kLargestBlock);
  const int64_t size = most / kBlock * kBlock;  // elements that share a scale stay together
  std::vector<Piece> blocks;
  for (int64_t i = 0; i < count; ++i) {
    Piece whole = pieces[i];
    whole.gradient = reinterpret_cast<const void*>(reinterpret_cast<intptr_t>(whole.gradient) + moved);
    for (int64_t start = 0; start < whole.count; start += size)
      blocks.push_back(cut(whole, start, std::min(size, whole.count - start)));
  }
  parallel(threads, static_cast<int64_t>(blocks.size()), [&](int64_t block) {
    const Piece& piece = blocks[block];
    kUpdateFor[isa](piece.format, rule, piece.gradient_dtype, piece.weight_dtype)(piece);
  });
  return 0;
}
