// Events: a point in a stream, recorded any number of times, each time anew.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "stream.h"

namespace torch_virtual {

class Event {
 public:
  explicit Event(bool timed) : timed(timed) {}

  void record(Stream& stream);
  void block(Stream& stream);  // the stream waits for it
  bool query();
  // `spins`: how the host waits. PyTorch's own events keep a core busy meanwhile, as CUDA's do unless they were made with
  // blocking synchronization.
  void synchronize(bool spins);
  double elapsed(Event& to);  // milliseconds

  const bool timed;

 private:
  std::shared_ptr<Moment> latest();

  std::mutex mutex_;
  std::shared_ptr<Moment> moment_;
};

// How often the host has waited for the device in a way that keeps a core busy on CUDA.
uint64_t spinning_waits();
void count_spinning_wait();

}  // namespace torch_virtual
