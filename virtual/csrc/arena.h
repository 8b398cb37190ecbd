// A device's address space: stretches of it are taken and given back, as a driver does.
//
// Note [Two mappings]
// Device memory is reserved twice, at a constant distance. The first range is never readable: its addresses are what
// tensors carry, so host code that follows a device pointer faults, always, also while a kernel runs. The second
// holds the bytes, and only kernels and copies know it. No protection is switched back and forth, so keeping the
// host out costs nothing.
#pragma once

#include <cstddef>
#include <map>
#include <set>

#include <c10/core/Device.h>

namespace torch_virtual {

// Not thread safe: its owner has the lock.
class Arena {
 public:
  explicit Arena(c10::DeviceIndex device);

  size_t take(size_t bytes);             // the offset of a stretch of at least so many bytes
  void give(size_t offset, size_t bytes);  // as it was taken
  void trim();                           // gives unused pages back to the host

  char* guard() const { return guard_; }
  char* bytes() const { return bytes_; }
  size_t size() const { return size_; }

 private:
  using Holes = std::map<size_t, size_t>;  // bytes by offset
  void add_hole(size_t offset, size_t bytes);

  const c10::DeviceIndex device_;
  char* guard_ = nullptr;  // addresses that tensors carry
  char* bytes_ = nullptr;  // where the bytes are
  size_t size_ = 0, committed_ = 0;
  Holes holes_;
  std::set<std::pair<size_t, size_t>> by_size_;  // bytes, offset
};

size_t round_up(size_t n, size_t grain);

}  // namespace torch_virtual
