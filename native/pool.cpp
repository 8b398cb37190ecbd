#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ferryman {
namespace {

// The calling thread may flush subnormals to zero (torch.set_flush_denormal) while the workers do not. Which thread
// computes which block depends on timing, so all must compute in the same mode.
class PlainFloats {
#if defined(__x86_64__)
 public:
  PlainFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // the state in which a thread starts
  ~PlainFloats() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
 public:
  PlainFloats() {}
#endif
};

class Pool {
 public:
  void run(int threads, int64_t blocks, const std::function<void(int64_t)>& work) {
    std::lock_guard<std::mutex> turn(turn_);
    const int helpers = grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      blocks_ = blocks;
      next_ = 0;
      helpers_ = busy_ = helpers;
      ++round_;
    }
    start_.notify_all();
    drain();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  // Returns how many of the requested workers exist: the system may refuse to start more.
  int grow(int wanted) {
    while (workers_ < wanted) {
      try {
        std::thread(&Pool::serve, this, workers_, round_).detach();
      } catch (const std::system_error&) {
        return workers_;
      }
      ++workers_;
    }
    return wanted;
  }

  void serve(int worker, int64_t seen) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "ferryman-pool");
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      start_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (worker >= helpers_) continue;
      lock.unlock();
      drain();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  void drain() {
    for (int64_t block; (block = next_.fetch_add(1, std::memory_order_relaxed)) < blocks_;) (*work_)(block);
  }

  std::mutex turn_;  // held for a whole run
  int workers_ = 0;  // guarded by turn_

  std::mutex mutex_;  // guards what follows
  std::condition_variable start_, done_;
  int64_t round_ = 0;
  int helpers_ = 0;  // the workers that take part in this round
  int busy_ = 0;     // those of them that have not finished
  const std::function<void(int64_t)>* work_ = nullptr;
  int64_t blocks_ = 0;
  std::atomic<int64_t> next_{0};
};

// Never destroyed: the workers wait on it until the process ends.
std::atomic<Pool*> current{nullptr};

// A forked child has no workers, and a mutex may be locked for ever. So it gets a new pool.
void forget() { current = nullptr; }

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget);
  (void)registered;
  Pool* existing = current;
  if (existing) return *existing;
  Pool* created = new Pool;
  if (current.compare_exchange_strong(existing, created)) return *created;
  delete created;
  return *existing;
}

}  // namespace

void parallel(int threads, int64_t blocks, const std::function<void(int64_t)>& work) {
  const PlainFloats plain;
  threads = static_cast<int>(std::min<int64_t>(threads, blocks));
  if (threads > 1) {
    pool().run(threads, blocks, work);
  } else {
    for (int64_t block = 0; block < blocks; ++block) work(block);
  }
}

}  // namespace ferryman
