// The devices of this process: each has memory, a link, streams and a generator of its own.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include "link.h"
#include "memory.h"
#include "stream.h"
#include "workspace.h"

namespace torch_virtual {

constexpr c10::StreamId kDefaultStream = 0;
constexpr c10::StreamId kPoolStreams = 32;  // as on CUDA: the 33rd new stream is the first again

class Device {
 public:
  explicit Device(c10::DeviceIndex index);

  Stream& stream(c10::StreamId id);
  Stream& next_stream();
  std::vector<Stream*> streams();  // those in use
  void synchronize();
  bool drain(const Stream* except, double patience);  // see Stream::drain; `except`: a kernel there is waiting for this

  const c10::DeviceIndex index;
  Memory memory;
  Link link;
  Workspaces workspaces;
  std::atomic<bool> has_float64{true};  // not every accelerator has
  at::Generator generator;

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;  // by id
  uint64_t handed_out_ = 0;
};

// Devices that are used for the first time from now on allocate as CUDA's caching allocator does, and have workspaces as
// cuBLAS has, with sizes divided by `scale`.
void set_unkind(size_t scale);

Device& device(c10::DeviceIndex index);  // ValueError when there is no such device
Device* device_if_used(c10::DeviceIndex index);
c10::DeviceIndex device_count();
void set_device_count(c10::DeviceIndex count);
c10::DeviceIndex device_of(const void* address);

// The current device and, for each device, the current stream are a thread's own.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
Stream& current_stream(c10::DeviceIndex index);
void set_current_stream(c10::DeviceIndex index, c10::StreamId id);

// A forked child has the memory of its parent but none of its threads.
bool forked();
void refuse_after_fork();

}  // namespace torch_virtual
