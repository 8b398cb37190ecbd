#include "memory.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "device.h"

namespace torch_virtual {

namespace {

constexpr size_t kGrain = 512;  // bytes; as on CUDA
constexpr size_t kCommit = size_t{64} << 20;
constexpr size_t kReserve = size_t{1} << 40;  // address space, not memory

thread_local Stream* t_kernel = nullptr;

size_t round_up(size_t n, size_t grain) {
  return (n + grain - 1) / grain * grain;
}

char* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
}

void free_block(void* context) {
  if (forked()) return;  // the parent's threads may have held locks that the child can never take
  auto block = BlockPtr::reclaim(static_cast<Block*>(context));
  block->memory.retire(*block);
}

// The block behind bytes that a kernel allocated, or null for ordinary host memory.
Block* kernel_block(const void* bytes) {
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    auto* d = device_if_used(i);
    if (d == nullptr) continue;
    if (auto* block = d->memory.find_bytes(bytes)) return block;
  }
  return nullptr;
}

struct HostOrKernelMemory;
HostOrKernelMemory* g_host_or_kernel = nullptr;

// The CPU's allocator, except while a kernel runs on this thread. One deleter serves both kinds of memory, and the
// context is the address, because parts of PyTorch (oneDNN's convolutions) allocate and free by bare address.
struct HostOrKernelMemory final : c10::Allocator {
  explicit HostOrKernelMemory(c10::Allocator* host) : host(host) {}
  c10::DataPtr allocate(size_t bytes) override {
    if (t_kernel == nullptr || bytes == 0) return host->allocate(bytes);
    auto block = device(t_kernel->device).memory.allocate(bytes, *t_kernel);
    void* data = block->memory.bytes(*block.release());
    return {data, data, &free_either, c10::Device(c10::kCPU)};
  }
  static void free_either(void* data) {
    if (auto* block = kernel_block(data)) return free_block(block);
    g_host_or_kernel->host->raw_deleter()(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_either; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override { return data.get() == data.get_context(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  c10::Allocator* host;
};

}  // namespace

std::string in_words(size_t bytes) {
  char text[64];
  const double b = static_cast<double>(bytes);
  if (bytes < (1u << 20)) {
    std::snprintf(text, sizeof text, "%.2f KiB", b / 1024);
  } else if (bytes < (1u << 30)) {
    std::snprintf(text, sizeof text, "%.2f MiB", b / (1 << 20));
  } else {
    std::snprintf(text, sizeof text, "%.2f GiB", b / (1 << 30));
  }
  return text;
}

Block::~Block() {
  memory.release(*this);
}

Memory::Memory(c10::DeviceIndex device)
    : device(device),
      capacity_(static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  for (reserved_ = kReserve; reserved_ >= kCommit; reserved_ /= 2) {
    guard_ = reserve(reserved_);
    bytes_ = guard_ ? reserve(reserved_) : nullptr;
    if (bytes_) return;
    if (guard_) munmap(guard_, reserved_);
  }
  TORCH_CHECK(false, "virtual:", int(device), " cannot reserve address space; is `ulimit -v` set?");
}

Memory::Holes::iterator Memory::take_hole(size_t room) {
  auto best = by_room_.lower_bound({room, 0});
  if (best == by_room_.end()) {
    const size_t more = round_up(room, kCommit);
    TORCH_CHECK_WITH(
        OutOfMemoryError, committed_ + more <= reserved_, "virtual:", int(device), " is out of address space");
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        mprotect(bytes_ + committed_, more, PROT_READ | PROT_WRITE) == 0,
        "virtual:", int(device), ": the host has no memory left for ", in_words(more));
    madvise(bytes_ + committed_, more, MADV_HUGEPAGE);
    add_hole(committed_, more);
    committed_ += more;
    best = by_room_.lower_bound({room, 0});
  }
  auto hole = holes_.find(best->second);
  by_room_.erase(best);
  return hole;
}

void Memory::add_hole(size_t offset, size_t room) {
  auto absorb = [&](Holes::iterator neighbour) {
    room += neighbour->second;
    by_room_.erase({neighbour->second, neighbour->first});
    holes_.erase(neighbour);
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
  if (next != holes_.end() && next->first == offset + room) absorb(next);
  by_room_.insert({room, offset});
  holes_.emplace(offset, room);
}

void Memory::count(Block& block, bool in) {
  using c10::CachingAllocator::StatType;
  const auto all = static_cast<size_t>(StatType::AGGREGATE);
  auto change = [&](c10::CachingAllocator::StatArray& stat, int64_t amount) {
    in ? stat[all].increase(amount) : stat[all].decrease(amount);
  };
  const auto bytes = static_cast<int64_t>(block.bytes);
  change(stats_.allocation, 1);
  change(stats_.active, 1);
  change(stats_.allocated_bytes, bytes);
  change(stats_.requested_bytes, bytes);
  change(stats_.active_bytes, bytes);
  change(stats_.reserved_bytes, bytes);
  block.counted = in;
}

BlockPtr Memory::allocate(size_t bytes, Stream& stream) {
  refuse_after_fork();
  const size_t room = round_up(bytes, kGrain);
  std::unique_lock lock(mutex_);
  auto used = [&] { return static_cast<size_t>(stats_.allocated_bytes[0].current); };
  if (used() + bytes > capacity_ && bytes <= capacity_ && waiting_ > 0) {
    // Memory that waits for other streams (record_stream) comes back. A kernel holds its stream's turn meanwhile, and
    // what it waits for may be behind it: then only briefly.
    const auto patience = std::chrono::seconds(t_kernel ? 1 : 60);
    returned_.wait_for(lock, patience, [&] { return used() + bytes <= capacity_ || waiting_ == 0; });
  }
  if (used() + bytes > capacity_) {
    ++stats_.num_ooms;
    const size_t in_use = used(), peak = static_cast<size_t>(stats_.allocated_bytes[0].peak);
    TORCH_CHECK_WITH(
        OutOfMemoryError, false,
        "virtual:", int(device), " is out of memory: ", in_words(bytes), " (", bytes, " bytes) wanted, ",
        in_words(capacity_ > in_use ? capacity_ - in_use : 0), " free; capacity ", in_words(capacity_), " (",
        capacity_, " bytes), in use ", in_words(in_use), " (", in_use, " bytes), peak ", in_words(peak));
  }
  auto hole = take_hole(room);
  const auto [offset, available] = *hole;
  holes_.erase(hole);
  if (available > room) add_hole(offset + room, available - room);
  auto block = c10::make_intrusive<Block>(*this, offset, bytes, room, stream);
  block->history.place = "virtual:" + std::to_string(device);
  blocks_.emplace(offset, block.get());
  count(*block, true);
  lock.unlock();
  Detector::get().allocated(block->history, bytes, stream.actor);
  return block;
}

void Memory::keep(Block& block, Stream& user) {
  std::lock_guard lock(mutex_);
  auto& kept = block.kept_for;
  if (&user != &block.stream && std::find(kept.begin(), kept.end(), &user) == kept.end()) kept.push_back(&user);
}

void Memory::retire(Block& block) {
  std::vector<Actor> kept;
  for (auto* s : block.kept_for) kept.push_back(s->actor);
  Detector::get().freed(block.history, block.stream.actor, kept);
  if (block.kept_for.empty()) {
    std::lock_guard lock(mutex_);
    count(block, false);
    returned_.notify_all();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    block.waiting = true;
    waiting_ += block.bytes;
  }
  auto self = BlockPtr::unsafe_reclaim_from_nonowning(&block);
  for (auto* s : block.kept_for) {
    s->enqueue([self](double ready) { return ready; });
  }
}

void Memory::release(Block& block) {
  std::lock_guard lock(mutex_);
  if (block.counted) count(block, false);
  if (block.waiting) waiting_ -= block.bytes;
  returned_.notify_all();
  blocks_.erase(block.offset);
  add_hole(block.offset, block.room);
}

void Memory::trim() {
  std::lock_guard lock(mutex_);
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const auto& [offset, room] : holes_) {
    const size_t lo = round_up(offset, page), hi = (offset + room) / page * page;
    if (lo < hi) madvise(bytes_ + lo, hi - lo, MADV_DONTNEED);
  }
}

bool Memory::owns(const void* address) const {
  const auto* p = static_cast<const char*>(address);
  return p >= guard_ && p < guard_ + reserved_;
}

Block* Memory::find(const void* address) {
  return find_at(static_cast<const char*>(address) - guard_);
}

Block* Memory::find_bytes(const void* bytes) {
  return find_at(static_cast<const char*>(bytes) - bytes_);
}

Block* Memory::find_at(ptrdiff_t offset) {
  if (offset < 0 || static_cast<size_t>(offset) >= reserved_) return nullptr;
  std::lock_guard lock(mutex_);
  auto it = blocks_.upper_bound(static_cast<size_t>(offset));
  if (it == blocks_.begin()) return nullptr;
  --it;
  return static_cast<size_t>(offset) < it->first + it->second->room ? it->second : nullptr;
}

size_t Memory::capacity() {
  std::lock_guard lock(mutex_);
  return capacity_;
}

void Memory::set_capacity(size_t bytes) {
  std::lock_guard lock(mutex_);
  capacity_ = bytes;
}

c10::CachingDeviceAllocator::DeviceStats Memory::stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

void Memory::reset_peak() {
  std::lock_guard lock(mutex_);
  for (auto* stat : {&stats_.allocation, &stats_.active, &stats_.allocated_bytes, &stats_.requested_bytes,
                     &stats_.active_bytes, &stats_.reserved_bytes}) {
    (*stat)[0].reset_peak();
  }
}

void Memory::reset_accumulated() {
  std::lock_guard lock(mutex_);
  for (auto* stat : {&stats_.allocation, &stats_.active, &stats_.allocated_bytes, &stats_.requested_bytes,
                     &stats_.active_bytes, &stats_.reserved_bytes}) {
    (*stat)[0].reset_accumulated();
  }
  stats_.num_ooms = 0;
}

std::pair<size_t, size_t> Memory::info() {
  std::lock_guard lock(mutex_);
  const auto used = static_cast<size_t>(stats_.allocated_bytes[0].current);
  return {capacity_ > used ? capacity_ - used : 0, capacity_};
}

c10::DataPtr as_data_ptr(BlockPtr block) {
  void* data = block->memory.address(*block);
  const c10::Device where(c10::kPrivateUse1, block->memory.device);
  return {data, block.release(), &free_block, where};
}

Block* block_of(const c10::DataPtr& data) {
  if (data.get_deleter() == &free_block) return static_cast<Block*>(data.get_context());
  if (data.get() == nullptr) return nullptr;
  return device(data.device().index()).memory.find(data.get());
}

c10::DataPtr DeviceMemory::allocate(size_t bytes) {
  const auto index = current_device();
  if (bytes == 0) return {nullptr, c10::Device(c10::kPrivateUse1, index)};
  return as_data_ptr(device(index).memory.allocate(bytes, current_stream(index)));
}

void DeviceMemory::copy_data(void* to, const void* from, size_t bytes) const {
  auto& memory = device(device_of(to)).memory;
  Block *target = memory.find(to), *source = memory.find(from);
  TORCH_INTERNAL_ASSERT(target && source);
  auto* base = memory.address(*target) - target->offset;
  auto* real = memory.bytes(*target) - target->offset;
  std::memcpy(real + (static_cast<char*>(to) - base), real + (static_cast<const char*>(from) - base), bytes);
}

void DeviceMemory::emptyCache(c10::MempoolId_t) {
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) device(i).memory.trim();
}

void DeviceMemory::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  if (auto* block = block_of(data)) {
    block->memory.keep(*block, device(stream.device_index()).stream(stream.id()));
  }
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex index) {
  return device(index).memory.stats();
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex index) {
  device(index).memory.reset_accumulated();
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex index) {
  device(index).memory.reset_peak();
}

std::pair<size_t, size_t> DeviceMemory::getMemoryInfo(c10::DeviceIndex index) {
  return device(index).memory.info();
}

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory;
  return *memory;
}

KernelMemory::KernelMemory(Stream& stream) : outer_(t_kernel) {
  t_kernel = &stream;
}

KernelMemory::~KernelMemory() {
  t_kernel = outer_;
}

BlockPtr KernelMemory::take(c10::DataPtr& data) {
  if (data.get_deleter() != &HostOrKernelMemory::free_either) return {};
  auto* block = kernel_block(data.get_context());
  if (block == nullptr) return {};
  data.release_context();
  return BlockPtr::reclaim(block);
}

namespace {

const bool registered = [] {
  c10::SetAllocator(c10::kPrivateUse1, &device_memory());
  // Above the default's priority: kernels allocate their results where they belong, so that nothing is copied.
  g_host_or_kernel = new HostOrKernelMemory(c10::GetCPUAllocator());
  c10::SetCPUAllocator(g_host_or_kernel, 1);
  return true;
}();

}  // namespace

}  // namespace torch_virtual
