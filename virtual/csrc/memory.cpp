#include "memory.h"

#include <chrono>
#include <cstdio>
#include <cstring>

#include <unistd.h>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "device.h"

namespace torch_virtual {

namespace {

// How long an allocation waits for other streams. A kernel holds its stream's turn meanwhile, and what it waits for may be
// behind it: then only briefly.
constexpr double kPatience = 60, kKernelPatience = 1;  // seconds

thread_local Stream* t_kernel = nullptr;

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
      arena_(device),
      capacity_(static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE))) {}

BlockPtr Memory::allocate(size_t bytes, Stream& stream) {
  refuse_after_fork();
  Lock lock(mutex_);
  const size_t room = round_up(bytes, caching_.rounding);
  const bool small = room <= caching_.small_segment / 2;
  const size_t segment = segment_for(room, small);
  auto piece = take_piece(stream, small, room);
  while (!piece) {
    if (reserved() + segment <= allowed()) {
      piece = take_segment(stream, small, segment);
    } else if (segment <= allowed() && (wait_for_return(lock) || release_unused(lock))) {
      piece = take_piece(stream, small, room);
    } else {
      run_out(bytes);
    }
  }
  const size_t rest = piece->bytes - room;
  const bool splits = rest > 0 && (small ? rest >= caching_.rounding : rest > caching_.small_segment / 2);
  auto owner = segment_of(piece->offset);
  if (splits) free_piece(owner, {piece->offset + room, rest});
  ++owner->second.blocks;
  auto block = c10::make_intrusive<Block>(*this, piece->offset, bytes, splits ? room : piece->bytes, stream);
  block->history.place = "virtual:" + std::to_string(device);
  blocks_.emplace(block->offset, block.get());
  count_allocated(*block, true);
  count_active(*block, true);
  lock.unlock();
  Detector::get().allocated(block->history, bytes, stream.actor);
  return block;
}

size_t Memory::segment_for(size_t room, bool small) const {
  if (!caching_.enabled()) return room;
  if (small) return caching_.small_segment;
  return room < caching_.large_segment / 2 ? caching_.large_segment : round_up(room, caching_.small_segment);
}

std::optional<Memory::Piece> Memory::take_piece(Stream& stream, bool small, size_t room) {
  auto& pool = pools_[{&stream, small}];
  auto best = pool.lower_bound({room, 0});
  if (best == pool.end()) return std::nullopt;
  const Piece piece{best->second, best->first};
  pool.erase(best);
  pieces_.erase(piece.offset);
  return piece;
}

Memory::Piece Memory::take_segment(Stream& stream, bool small, size_t bytes) {
  const size_t offset = arena_.take(bytes);
  const auto& made = segments_[offset] = {bytes, &stream, small, caching_.enabled(), 0};
  count_segment(made, true);
  return {offset, bytes};
}

bool Memory::wait_for_return(Lock& lock) {
  if (waiting_ == 0) return false;
  const size_t before = waiting_;
  const auto patience = std::chrono::duration<double>(t_kernel ? kKernelPatience : kPatience);
  return returned_.wait_for(lock, patience, [&] { return waiting_ < before; });
}

bool Memory::release_unused(Lock& lock) {
  auto unused = [](const Segment& segment) { return segment.cached && segment.blocks == 0; };
  auto any = [&] {
    return std::any_of(segments_.begin(), segments_.end(), [&](const auto& entry) { return unused(entry.second); });
  };
  if (!any()) return false;
  // As cudaFree does: what was launched may still use memory that has been freed on its stream.
  lock.unlock();
  const bool idle = torch_virtual::device(device).drain(t_kernel, t_kernel ? kKernelPatience : kPatience);
  lock.lock();
  if (!idle || !any()) return false;
  for (auto it = segments_.begin(); it != segments_.end();) {
    const auto& [offset, segment] = *it;
    if (!unused(segment)) {
      ++it;
      continue;
    }
    pools_[{segment.stream, segment.small}].erase({segment.bytes, offset});
    pieces_.erase(offset);
    count_segment(segment, false);
    arena_.give(offset, segment.bytes);
    it = segments_.erase(it);
  }
  return true;
}

void Memory::run_out(size_t bytes) {
  ++stats_.num_ooms;
  const auto in_use = static_cast<size_t>(stats_.allocated_bytes[0].current), kept = reserved() - in_use;
  const auto peak = static_cast<size_t>(stats_.allocated_bytes[0].peak);
  TORCH_CHECK_WITH(
      OutOfMemoryError, false,
      "virtual:", int(device), " is out of memory: ", in_words(bytes), " (", bytes, " bytes) wanted, ",
      in_words(allowed() > reserved() ? allowed() - reserved() : 0), " free; capacity ", in_words(capacity_), " (",
      capacity_, " bytes), in use ", in_words(in_use), " (", in_use, " bytes), peak ", in_words(peak),
      fraction_ < 1 ? "; this process may take " + in_words(allowed()) : "",
      kept > 0 ? "; reserved and not allocated " + in_words(kept) + " (" + std::to_string(kept) + " bytes)" : "");
}

namespace {

void change(c10::CachingAllocator::StatArray& stat, size_t amount, bool in) {
  auto& all = stat[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  in ? all.increase(static_cast<int64_t>(amount)) : all.decrease(static_cast<int64_t>(amount));
}

}  // namespace

void Memory::count_segment(const Segment& segment, bool in) {
  change(stats_.segment, 1, in);
  change(stats_.reserved_bytes, segment.bytes, in);
}

void Memory::count_allocated(Block& block, bool in) {
  change(stats_.allocation, 1, in);
  change(stats_.allocated_bytes, block.room, in);
  change(stats_.requested_bytes, block.bytes, in);
  block.allocated = in;
}

void Memory::count_active(Block& block, bool in) {
  change(stats_.active, 1, in);
  change(stats_.active_bytes, block.room, in);
  block.active = in;
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
  {
    std::lock_guard lock(mutex_);
    auto segment = segment_of(block.offset);
    const bool cached = segment->second.cached;
    if (block.kept_for.empty()) {
      count_allocated(block, false);
      count_active(block, false);
      if (cached) {
        return_room(block);  // at once: what its own stream has launched comes before what the next user launches
      } else {
        count_segment(segment->second, false);
      }
      returned_.notify_all();
      return;
    }
    if (cached) count_allocated(block, false);
    block.waiting = true;
    waiting_ += block.room;
  }
  auto self = BlockPtr::unsafe_reclaim_from_nonowning(&block);
  for (auto* s : block.kept_for) {
    s->enqueue([self](double ready) { return ready; });
  }
}

void Memory::release(Block& block) {
  std::lock_guard lock(mutex_);
  if (block.allocated) count_allocated(block, false);
  if (block.waiting) waiting_ -= block.room;
  const bool was_active = block.active;
  if (was_active) count_active(block, false);
  if (!block.returned) {
    auto segment = segment_of(block.offset);
    if (was_active && !segment->second.cached) count_segment(segment->second, false);
    return_room(block);
  }
  returned_.notify_all();
}

void Memory::return_room(Block& block) {
  block.returned = true;
  blocks_.erase(block.offset);
  auto segment = segment_of(block.offset);
  --segment->second.blocks;
  if (segment->second.cached) {
    free_piece(segment, {block.offset, block.room});
  } else {
    arena_.give(segment->first, segment->second.bytes);
    segments_.erase(segment);
  }
}

void Memory::free_piece(Segments::iterator segment, Piece piece) {
  auto& pool = pools_[{segment->second.stream, segment->second.small}];
  auto absorb = [&](std::map<size_t, size_t>::iterator neighbor) {
    piece = {std::min(piece.offset, neighbor->first), piece.bytes + neighbor->second};
    pool.erase({neighbor->second, neighbor->first});
    pieces_.erase(neighbor);
  };
  auto next = pieces_.lower_bound(piece.offset);
  if (next != pieces_.begin()) {
    auto before = std::prev(next);
    if (before->first >= segment->first && before->first + before->second == piece.offset) absorb(before);
  }
  next = pieces_.lower_bound(piece.offset + 1);
  const size_t end = segment->first + segment->second.bytes;
  if (next != pieces_.end() && next->first < end && next->first == piece.offset + piece.bytes) absorb(next);
  pieces_.emplace(piece.offset, piece.bytes);
  pool.insert({piece.bytes, piece.offset});
}

void Memory::empty_cache() {
  Lock lock(mutex_);
  release_unused(lock);
  arena_.trim();
}

bool Memory::owns(const void* address) const {
  const auto* p = static_cast<const char*>(address);
  return p >= arena_.guard() && p < arena_.guard() + arena_.size();
}

Block* Memory::find(const void* address) {
  return find_at(static_cast<const char*>(address) - arena_.guard());
}

Block* Memory::find_bytes(const void* bytes) {
  return find_at(static_cast<const char*>(bytes) - arena_.bytes());
}

Block* Memory::find_at(ptrdiff_t offset) {
  if (offset < 0 || static_cast<size_t>(offset) >= arena_.size()) return nullptr;
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

double Memory::fraction() {
  std::lock_guard lock(mutex_);
  return fraction_;
}

void Memory::set_fraction(double fraction) {
  std::lock_guard lock(mutex_);
  fraction_ = fraction;
}

Caching Memory::caching() {
  std::lock_guard lock(mutex_);
  return caching_;
}

void Memory::set_caching(const Caching& caching) {
  std::lock_guard lock(mutex_);
  caching_ = caching;
}

c10::CachingDeviceAllocator::DeviceStats Memory::stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

void Memory::reset_peak() {
  std::lock_guard lock(mutex_);
  for (auto* stat : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes,
                     &stats_.requested_bytes, &stats_.active_bytes, &stats_.reserved_bytes}) {
    (*stat)[0].reset_peak();
  }
}

void Memory::reset_accumulated() {
  std::lock_guard lock(mutex_);
  for (auto* stat : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes,
                     &stats_.requested_bytes, &stats_.active_bytes, &stats_.reserved_bytes}) {
    (*stat)[0].reset_accumulated();
  }
  stats_.num_ooms = 0;
}

std::pair<size_t, size_t> Memory::info() {
  std::lock_guard lock(mutex_);
  return {capacity_ > reserved() ? capacity_ - reserved() : 0, capacity_};
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
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    if (auto* d = device_if_used(i)) d->memory.empty_cache();
  }
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
