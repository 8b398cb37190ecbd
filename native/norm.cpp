#define FERRYMAN_KERNEL "norm.inl"
#include "every_isa.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace ferryman {
namespace {

// Fixed, so that the order of additions does not depend on the number of threads. Much larger than the cost of taking a
// block (one atomic operation), and much smaller than the second-level cache of a core.
constexpr int64_t kBlock = 1 << 16;

using SumOfSquares = double (*)(const void*, int64_t);
constexpr SumOfSquares kSumOfSquares[][3] = {
    FERRYMAN_EVERY_ISA(sum_of_squares_float32),
    FERRYMAN_EVERY_ISA(sum_of_squares_bfloat16),
    FERRYMAN_EVERY_ISA(sum_of_squares_float16),
};

}  // namespace
}  // namespace ferryman

// Sums for each of `count` parts of an array, given by their begin and end. In double, squares of floats cannot overflow
// in any number that fits in memory: a sum is finite exactly when every element is. That makes the check for inf and NaN
// free.
FERRYMAN_EXPORT int ferryman_sums_of_squares(const void* data, const int64_t* bounds, int64_t count, int dtype, int isa,
                                             int threads, double* sums) {
  using namespace ferryman;
  struct Block {
    int64_t part, start, stop;
    double sum;
  };
  const SumOfSquares sum_of_squares = kSumOfSquares[dtype][isa];
  const int64_t width = dtype == kFloat32 ? 4 : 2;
  const char* bytes = static_cast<const char*>(data);
  int64_t elements = 0;
  std::vector<Block> blocks;
  for (int64_t part = 0; part < count; ++part) {
    const int64_t stop = bounds[2 * part + 1];
    for (int64_t start = bounds[2 * part]; start < stop; start += kBlock)
      blocks.push_back({part, start, std::min(start + kBlock, stop), 0});
    elements += stop - bounds[2 * part];
  }
  // Many small parts are no work for several threads: waking one takes longer than a block.
  threads = static_cast<int>(std::clamp<int64_t>((elements + kBlock - 1) / kBlock, 1, threads));
  parallel(threads, static_cast<int64_t>(blocks.size()), [&](int64_t number) {
    Block& block = blocks[number];
    block.sum = sum_of_squares(bytes + block.start * width, block.stop - block.start);
  });
  std::fill(sums, sums + count, 0.0);
  for (const Block& block : blocks) sums[block.part] += block.sum;
  return 0;
}
