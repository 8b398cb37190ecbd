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

// In double, squares of floats cannot overflow in any number that fits in memory: the result is finite exactly when
// every element is. That makes the check for inf and NaN free.
FERRYMAN_EXPORT double ferryman_sum_of_squares(const void* data, int64_t count, int dtype, int isa, int threads) {
  using namespace ferryman;
  const SumOfSquares sum_of_squares = kSumOfSquares[dtype][isa];
  const int64_t width = dtype == kFloat32 ? 4 : 2;
  const char* bytes = static_cast<const char*>(data);
  std::vector<double> sums((count + kBlock - 1) / kBlock);
  parallel(threads, static_cast<int64_t>(sums.size()), [&](int64_t block) {
    const int64_t start = block * kBlock;
    sums[block] = sum_of_squares(bytes + start * width, std::min(kBlock, count - start));
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}
