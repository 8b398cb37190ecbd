// A device's memory: an arena whose addresses the host cannot touch.
//
// Note [Two mappings]
// Device memory is reserved twice, at a constant distance. The first range is never readable: its addresses are what
// tensors carry, so host code that follows a device pointer faults, always, also while a kernel runs. The second
// holds the bytes, and only kernels and copies know it. No protection is switched back and forth, so keeping the
// host out costs nothing.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/intrusive_ptr.h>

#include "race.h"
#include "stream.h"

namespace torch_virtual {

class Memory;

// One allocation. It lives until its tensor is gone and every copy that uses it has ended.
struct Block : c10::intrusive_ptr_target {
  Block(Memory& memory, size_t offset, size_t bytes, size_t room, Stream& stream)
      : memory(memory), offset(offset), bytes(bytes), room(room), stream(stream) {}
  ~Block() override;

  Memory& memory;
  const size_t offset, bytes, room;  // room: bytes, rounded up to the grain
  Stream& stream;                    // the stream it was allocated for
  std::vector<Stream*> kept_for;     // record_stream: streams that must pass before the memory is used again
  bool counted = true;               // in the device's use
  bool waiting = false;              // its tensor is gone, and those streams have not passed yet
  History history;
};
using BlockPtr = c10::intrusive_ptr<Block>;

class Memory {
 public:
  explicit Memory(c10::DeviceIndex device);

  BlockPtr allocate(size_t bytes, Stream& stream);  // OutOfMemoryError beyond the capacity
  void keep(Block& block, Stream& user);            // record_stream
  void retire(Block& block);                        // its tensor is gone
  void release(Block& block);                       // nothing uses it any more
  void trim();                                      // gives unused pages back to the host

  char* address(const Block& block) const { return guard_ + block.offset; }
  char* bytes(const Block& block) const { return bytes_ + block.offset; }
  bool owns(const void* address) const;
  Block* find(const void* address);      // by an address that tensors carry
  Block* find_bytes(const void* bytes);  // by one that kernels use

  size_t capacity();
  void set_capacity(size_t bytes);
  c10::CachingDeviceAllocator::DeviceStats stats();
  void reset_peak();
  void reset_accumulated();
  std::pair<size_t, size_t> info();  // free, total

  const c10::DeviceIndex device;

 private:
  using Holes = std::map<size_t, size_t>;  // room by offset
  Holes::iterator take_hole(size_t room);
  void add_hole(size_t offset, size_t room);
  void count(Block& block, bool in);
  Block* find_at(ptrdiff_t offset);

  std::mutex mutex_;
  char* guard_ = nullptr;
  char* bytes_ = nullptr;
  size_t reserved_ = 0, committed_ = 0;
  Holes holes_;
  std::set<std::pair<size_t, size_t>> by_room_;  // room, offset
  std::map<size_t, Block*> blocks_;              // by offset
  size_t capacity_;
  size_t waiting_ = 0;  // bytes whose tensors are gone and which other streams have not passed yet
  std::condition_variable returned_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

// What c10 calls. The data pointer is the unreadable address, its context the block.
struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;
};

DeviceMemory& device_memory();
c10::DataPtr as_data_ptr(BlockPtr block);
Block* block_of(const c10::DataPtr& data);

// While a kernel runs, what the CPU's operators allocate on its thread is device memory.
class KernelMemory {
 public:
  explicit KernelMemory(Stream& stream);
  ~KernelMemory();
  KernelMemory(const KernelMemory&) = delete;
  KernelMemory& operator=(const KernelMemory&) = delete;
  // The block behind a CPU data pointer that a kernel allocated, taken out of it; null for other memory.
  static BlockPtr take(c10::DataPtr& data);

 private:
  Stream* outer_;
};

std::string in_words(size_t bytes);

}  // namespace torch_virtual
