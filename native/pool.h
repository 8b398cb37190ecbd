// A thread pool. OpenMP would take the number of threads from OMP_NUM_THREADS, which torchrun sets to 1, and it does
// not survive a fork.
#pragma once

#include <cstdint>
#include <functional>

namespace ferryman {

// Calls work(0) ... work(blocks - 1), each once, on the calling thread and up to threads - 1 others; returns when all
// are done. Calls from several threads take turns. `work` must not throw and must not call parallel().
void parallel(int threads, int64_t blocks, const std::function<void(int64_t)>& work);

}  // namespace ferryman
