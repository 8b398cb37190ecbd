// A device's memory: allocations, and what is kept of freed ones for later, as CUDA's caching allocator does.
//
// Note [Segments and pools]
// The allocator takes segments from the device and cuts them into blocks. A freed block goes back to the pool of the
// stream it was allocated for, and no other stream can have it; blocks of at most half a small segment have pools of
// their own. So what a process takes from the device (*reserved*) is more than what its tensors use (*allocated*).
// Segments go back to the device when the cache is emptied, or when there is no other way to serve an allocation. What
// `record_stream` was called for stays *active* after its tensor is gone, until those streams have passed.
// Without caching every allocation is a segment of its own, to the byte, and nothing is kept: what is reserved is what
// is active.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/intrusive_ptr.h>

#include "arena.h"
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
  const size_t offset, bytes, room;  // room: what it takes of its segment, of which `bytes` were asked for
  Stream& stream;                    // the stream it was allocated for
  std::vector<Stream*> kept_for;     // record_stream: streams that must pass before the memory is used again
  bool allocated = true;             // counted as such
  bool active = true;                // counted as such
  bool waiting = false;              // its tensor is gone, and those streams have not passed yet
  bool returned = false;             // its room is free for others
  History history;
};
using BlockPtr = c10::intrusive_ptr<Block>;

// How freed memory is kept; sizes are in bytes. See Note [Segments and pools].
struct Caching {
  size_t rounding = 1;       // allocations take multiples of it
  size_t small_segment = 0;  // for allocations of at most half of it
  size_t large_segment = 0;  // for others of less than half of it; larger ones take multiples of a small segment
  bool enabled() const { return large_segment > 0; }
};

class Memory {
 public:
  explicit Memory(c10::DeviceIndex device);

  BlockPtr allocate(size_t bytes, Stream& stream);  // OutOfMemoryError beyond the capacity
  void keep(Block& block, Stream& user);            // record_stream
  void retire(Block& block);                        // its tensor is gone
  void release(Block& block);                       // nothing uses it any more
  void empty_cache();                               // unused segments go back to the device, pages to the host

  char* address(const Block& block) const { return arena_.guard() + block.offset; }
  char* bytes(const Block& block) const { return arena_.bytes() + block.offset; }
  bool owns(const void* address) const;
  Block* find(const void* address);      // by an address that tensors carry
  Block* find_bytes(const void* bytes);  // by one that kernels use

  size_t capacity();
  void set_capacity(size_t bytes);
  double fraction();
  void set_fraction(double fraction);  // of the capacity that this process may reserve
  Caching caching();
  void set_caching(const Caching& caching);  // for segments that are taken from now on
  c10::CachingDeviceAllocator::DeviceStats stats();
  void reset_peak();
  void reset_accumulated();
  std::pair<size_t, size_t> info();  // free, total

  const c10::DeviceIndex device;

 private:
  struct Segment {
    size_t bytes;
    Stream* stream;
    bool small;    // its blocks are
    bool cached;   // it stays when nothing is in it
    int blocks;    // that are in it and not returned
  };
  using Segments = std::map<size_t, Segment>;  // by offset
  struct Piece {
    size_t offset, bytes;
  };
  using Pool = std::set<std::pair<size_t, size_t>>;  // free pieces: bytes, offset
  using Lock = std::unique_lock<std::mutex>;

  std::optional<Piece> take_piece(Stream& stream, bool small, size_t room);
  Piece take_segment(Stream& stream, bool small, size_t bytes);
  size_t segment_for(size_t room, bool small) const;
  bool wait_for_return(Lock& lock);
  bool release_unused(Lock& lock);
  [[noreturn]] void run_out(size_t bytes);
  size_t reserved() const { return static_cast<size_t>(stats_.reserved_bytes[0].current); }
  size_t allowed() const { return static_cast<size_t>(static_cast<double>(capacity_) * fraction_); }
  Segments::iterator segment_of(size_t offset) { return std::prev(segments_.upper_bound(offset)); }
  void count_segment(const Segment& segment, bool in);
  void count_allocated(Block& block, bool in);
  void count_active(Block& block, bool in);
  void return_room(Block& block);
  void free_piece(Segments::iterator segment, Piece piece);
  Block* find_at(ptrdiff_t offset);

  std::mutex mutex_;
  Arena arena_;
  Segments segments_;
  std::map<size_t, size_t> pieces_;                    // free pieces of segments: bytes by offset
  std::map<std::pair<Stream*, bool>, Pool> pools_;     // of a stream; small or large
  std::map<size_t, Block*> blocks_;                    // by offset
  Caching caching_;
  size_t capacity_;
  double fraction_ = 1;
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
