// Streams and events. A stream is an in-order queue; copies run on its own thread, kernels on the thread that
// launches them, in their turn.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>

#include "race.h"

namespace torch_virtual {

// One recording of an event: a point in a stream that has passed or will.
class Moment {
 public:
  explicit Moment(Clock clock) : clock(std::move(clock)) {}
  void pass(double when);
  bool passed();
  double wait();  // returns when it passed

  const Clock clock;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  double when_ = 0;
  bool passed_ = false;
};

class Stream {
 public:
  // Work is told when it could have begun and returns when it ended.
  using Work = std::function<double(double)>;
  // Called as work takes its place in the queue, so that the detector's order is the queue's, also where several
  // threads use one stream. It may raise; then there is no such work.
  using Launch = c10::function_ref<void()>;

  Stream(c10::DeviceIndex device, c10::StreamId id);

  void enqueue(Work work, Launch launch);
  void enqueue(Work work) { enqueue(std::move(work), [] {}); }
  void begin_kernel(Launch launch);
  void end_kernel();

  std::shared_ptr<Moment> record();
  void wait(const std::shared_ptr<Moment>& moment);
  void synchronize();
  bool query();
  bool drain(double deadline);  // waits for all that was launched, telling the race detector nothing; false: too long

  const c10::DeviceIndex device;
  const c10::StreamId id;
  const Actor actor;

 private:
  struct Task {
    uint64_t number;
    double enqueued;
    Work work;  // empty: the place of a kernel, which its own thread will run
    std::shared_ptr<Moment> moment;  // passes when the work counts as done, not before: query() must agree with it
  };
  void push(Work work, std::shared_ptr<Moment> moment = nullptr);  // the lock is held
  void run();
  bool idle() const { return queue_.empty() && !busy_; }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable has_work_;  // the thread's own: kernels that follow one another need not wake it
  std::deque<Task> queue_;
  bool busy_ = false;
  bool has_thread_ = false;
  uint64_t submitted_ = 0, completed_ = 0;
  double ended_ = 0;  // when the last piece of work ended
};

// Holds a stream's turn while a kernel runs.
class KernelTurn {
 public:
  KernelTurn(Stream& stream, Stream::Launch launch) : stream_(stream) { stream_.begin_kernel(launch); }
  ~KernelTurn() { stream_.end_kernel(); }
  KernelTurn(const KernelTurn&) = delete;
  KernelTurn& operator=(const KernelTurn&) = delete;

 private:
  Stream& stream_;
};

}  // namespace torch_virtual
