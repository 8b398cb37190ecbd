#include "arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include "memory.h"

namespace torch_virtual {

namespace {

constexpr size_t kGrain = 512;  // bytes; the alignment of every stretch
constexpr size_t kCommit = size_t{64} << 20;
constexpr size_t kReserve = size_t{1} << 40;  // address space, not memory

char* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
}

}  // namespace

size_t round_up(size_t n, size_t grain) {
  return (n + grain - 1) / grain * grain;
}

Arena::Arena(c10::DeviceIndex device) : device_(device) {
  for (size_ = kReserve; size_ >= kCommit; size_ /= 2) {
    guard_ = reserve(size_);
    bytes_ = guard_ ? reserve(size_) : nullptr;
    if (bytes_) return;
    if (guard_) munmap(guard_, size_);
  }
  TORCH_CHECK(false, "virtual:", int(device), " cannot reserve address space; is `ulimit -v` set?");
}

size_t Arena::take(size_t bytes) {
  bytes = round_up(bytes, kGrain);
  auto best = by_size_.lower_bound({bytes, 0});
  if (best == by_size_.end()) {
    const size_t more = round_up(bytes, kCommit);
    TORCH_CHECK_WITH(
        OutOfMemoryError, committed_ + more <= size_, "virtual:", int(device_), " is out of address space");
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        mprotect(bytes_ + committed_, more, PROT_READ | PROT_WRITE) == 0,
        "virtual:", int(device_), ": the host has no memory left for ", in_words(more));
    madvise(bytes_ + committed_, more, MADV_HUGEPAGE);
    add_hole(committed_, more);
    committed_ += more;
    best = by_size_.lower_bound({bytes, 0});
  }
  const auto [available, offset] = *best;
  by_size_.erase(best);
  holes_.erase(offset);
  if (available > bytes) add_hole(offset + bytes, available - bytes);
  return offset;
}

void Arena::give(size_t offset, size_t bytes) {
  add_hole(offset, round_up(bytes, kGrain));
}

void Arena::add_hole(size_t offset, size_t bytes) {
  auto absorb = [&](Holes::iterator neighbor) {
    bytes += neighbor->second;
    by_size_.erase({neighbor->second, neighbor->first});
    holes_.erase(neighbor);
  };
  auto next = holes_.lower_bound(offset);
  if (next != holes_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      absorb(before);
    }
  }
  next = holes_.lower_bound(offset);
  if (next != holes_.end() && next->first == offset + bytes) absorb(next);
  by_size_.insert({bytes, offset});
  holes_.emplace(offset, bytes);
}

void Arena::trim() {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const auto& [offset, bytes] : holes_) {
    const size_t lo = round_up(offset, page), hi = (offset + bytes) / page * page;
    if (lo < hi) madvise(bytes_ + lo, hi - lo, MADV_DONTNEED);
  }
}

}  // namespace torch_virtual
