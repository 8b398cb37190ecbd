#include "device.h"

#include <atomic>
#include <cstdlib>

#include <pthread.h>

#include <c10/util/Exception.h>

#include "clock.h"
#include "generator.h"

namespace torch_virtual {

namespace {

constexpr int kMostDevices = 64;
constexpr int kDevices = 4;

std::atomic<Device*> g_devices[kMostDevices];
std::atomic<int> g_count{0};
std::mutex g_mutex;
std::atomic<bool> g_forked{false};
std::atomic<size_t> g_unkind{0};  // see set_unkind; 0: memory is exact to the byte

constexpr size_t kRounding = 512, kAlignment = 64;
constexpr size_t kSmallSegment = 2 << 20, kLargeSegment = 20 << 20, kWorkspace = 8 << 20;

thread_local c10::DeviceIndex t_device = 0;
thread_local std::vector<c10::StreamId> t_streams;

int initial_count() {
  const char* text = std::getenv("TORCH_VIRTUAL_DEVICES");
  char* rest = nullptr;
  const long count = text ? std::strtol(text, &rest, 10) : kDevices;
  TORCH_CHECK_VALUE(
      (rest == nullptr || *rest == 0) && count >= 1 && count <= kMostDevices, "TORCH_VIRTUAL_DEVICES must be from 1 to ", kMostDevices, ", not '",
      text ? text : "", "'");
  return static_cast<int>(count);
}

}  // namespace

Device::Device(c10::DeviceIndex index) : index(index), memory(index), generator(make_generator(index)) {
  streams_.resize(kPoolStreams + 1);
  if (const size_t scale = g_unkind) {
    memory.set_caching({std::max(kRounding / scale, kAlignment), kSmallSegment / scale, kLargeSegment / scale});
    workspaces.set_size(kWorkspace / scale);
  }
}

void set_unkind(size_t scale) {
  g_unkind = scale;
}

Stream& Device::stream(c10::StreamId id) {
  TORCH_CHECK_VALUE(id >= 0 && id <= kPoolStreams, "virtual:", int(index), " has no stream ", id);
  std::lock_guard lock(mutex_);
  auto& stream = streams_[id];
  if (!stream) stream = std::make_unique<Stream>(index, id);
  return *stream;
}

Stream& Device::next_stream() {
  c10::StreamId id;
  {
    std::lock_guard lock(mutex_);
    id = 1 + static_cast<c10::StreamId>(handed_out_++ % kPoolStreams);
  }
  return stream(id);
}

std::vector<Stream*> Device::streams() {
  std::lock_guard lock(mutex_);
  std::vector<Stream*> used;
  for (auto& s : streams_) {
    if (s) used.push_back(s.get());
  }
  return used;
}

void Device::synchronize() {
  for (auto* s : streams()) s->synchronize();
}

bool Device::drain(const Stream* except, double patience) {
  const double deadline = seconds() + patience;
  for (auto* s : streams()) {
    if (s != except && !s->drain(deadline)) return false;
  }
  return true;
}

c10::DeviceIndex device_count() {
  if (g_count == 0) {
    std::lock_guard lock(g_mutex);
    if (g_count == 0) g_count = initial_count();
  }
  return static_cast<c10::DeviceIndex>(g_count.load());
}

void set_device_count(c10::DeviceIndex count) {
  const auto now = device_count();
  TORCH_CHECK_VALUE(
      count >= now && count <= kMostDevices, "the number of virtual devices can grow from ", int(now), " to at most ",
      kMostDevices, "; ", int(count), " was asked for");
  g_count = count;
}

Device& device(c10::DeviceIndex index) {
  TORCH_CHECK_VALUE(
      index >= 0 && index < device_count(), "virtual:", int(index), " does not exist: there are ", int(device_count()),
      " virtual devices. Set TORCH_VIRTUAL_DEVICES before the import, or call torch_virtual.set_device_count");
  auto* found = device_if_used(index);
  if (found == nullptr) {
    std::lock_guard lock(g_mutex);
    found = device_if_used(index);
    if (found == nullptr) {
      // From the first use on, not from the import: a process forked before may still use the devices.
      static const int watching = pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
      (void)watching;
      g_devices[index] = found = new Device(index);  // never destroyed: its threads use it
    }
  }
  return *found;
}

Device* device_if_used(c10::DeviceIndex index) {
  return g_devices[index].load(std::memory_order_acquire);
}

c10::DeviceIndex device_of(const void* address) {
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    auto* d = device_if_used(i);
    if (d != nullptr && d->memory.owns(address)) return i;
  }
  TORCH_CHECK_VALUE(false, "no virtual device owns the address ", address);
}

c10::DeviceIndex current_device() {
  return t_device;
}

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK_VALUE(
      index >= 0 && index < device_count(), "virtual:", int(index), " does not exist: there are ", int(device_count()),
      " virtual devices");
  t_device = index;
}

Stream& current_stream(c10::DeviceIndex index) {
  const auto i = static_cast<size_t>(index < 0 ? t_device : index);
  return device(static_cast<c10::DeviceIndex>(i)).stream(i < t_streams.size() ? t_streams[i] : kDefaultStream);
}

void set_current_stream(c10::DeviceIndex index, c10::StreamId id) {
  const auto i = static_cast<size_t>(index);
  if (i >= t_streams.size()) t_streams.resize(i + 1, kDefaultStream);
  t_streams[i] = id;
}

bool forked() {
  return g_forked;
}

void refuse_after_fork() {
  TORCH_CHECK(
      !g_forked, "the virtual device cannot be used in a forked process: its threads were not forked with it. Start ",
      "the process with the 'spawn' method");
}

}  // namespace torch_virtual
