#include "host.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include <sys/mman.h>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include "clock.h"
#include "device.h"
#include "kernel.h"

namespace torch_virtual {

namespace {

std::shared_mutex g_mutex;

std::map<uintptr_t, std::shared_ptr<PinnedBlock>>& table() {
  static auto* blocks = new std::map<uintptr_t, std::shared_ptr<PinnedBlock>>;
  return *blocks;
}

uintptr_t number(const void* address) {
  return reinterpret_cast<uintptr_t>(address);
}

size_t g_limit = SIZE_MAX, g_pinned = 0;  // bytes

constexpr uintptr_t kPage = 4096;
bool g_whole_pages = false;  // whether no two blocks may share a page

uintptr_t grain() {
  return g_whole_pages ? kPage : 1;
}

uintptr_t begin_of(const PinnedBlock& block) {
  return number(block.base) / grain() * grain();
}

uintptr_t end_of(const PinnedBlock& block) {
  return (number(block.base) + block.bytes + grain() - 1) / grain() * grain();
}

void add(std::shared_ptr<PinnedBlock> block) {
  device(current_device());  // its context is opened, as a driver does for pinned memory
  std::unique_lock lock(g_mutex);
  auto next = table().upper_bound(number(block->base));
  const bool free_after = next == table().end() || end_of(*block) <= begin_of(*next->second);
  const bool free_before = next == table().begin() || end_of(*std::prev(next)->second) <= begin_of(*block);
  TORCH_CHECK_VALUE(
      free_after && free_before, "the host memory at ", block->base, " (", block->bytes,
      g_whole_pages ? " bytes) has pages that are pinned already: memory is pinned page by page"
                    : " bytes) overlaps memory that is pinned already");
  TORCH_CHECK_WITH(
      OutOfMemoryError, block->bytes <= g_limit - std::min(g_limit, g_pinned), "the driver refuses to pin ",
      in_words(block->bytes), " of host memory: ", in_words(g_pinned), " are pinned, and ", in_words(g_limit),
      " is the limit");
  g_pinned += block->bytes;
  table().emplace(number(block->base), std::move(block));
}

std::shared_ptr<PinnedBlock> remove(const void* base, bool owned) {
  std::unique_lock lock(g_mutex);
  auto found = table().find(number(base));
  if (found == table().end() || found->second->owned != owned) return nullptr;
  auto block = std::move(found->second);
  g_pinned -= block->bytes;
  table().erase(found);
  return block;
}

// A copy in flight holds the block, so the pages go when the last of them has ended.
void free_pinned(void* base) {
  if (!forked()) remove(base, true);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    // Exactly the pages needed, touched now: the first touch costs several times the second.
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    TORCH_CHECK_WITH(
        OutOfMemoryError, base != MAP_FAILED, "the host has no memory left for ", in_words(bytes), " of pinned memory");
    add(std::make_shared<PinnedBlock>(base, bytes, true));
    return {base, base, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies hold their blocks
  void empty_cache() override {}
  at::HostStats get_stats() override {
    at::HostStats stats;
    std::shared_lock lock(g_mutex);
    for (const auto& [base, block] : table()) {
      stats.allocated_bytes.increase(static_cast<int64_t>(block->bytes));
      stats.allocations.increase(1);
    }
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory& the_pinned_memory() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

}  // namespace

PinnedBlock::~PinnedBlock() {
  if (owned) munmap(base, bytes);
}

c10::Allocator* pinned_memory() {
  return &the_pinned_memory();
}

std::shared_ptr<PinnedBlock> pinned_block(const void* address, size_t bytes) {
  std::shared_lock lock(g_mutex);
  auto next = table().upper_bound(number(address));
  if (next == table().begin()) return nullptr;
  const auto& block = std::prev(next)->second;
  return number(address) + bytes <= number(block->base) + block->bytes ? block : nullptr;
}

std::optional<Touch> pinned_range(const at::Tensor& tensor, Use use, std::shared_ptr<PinnedBlock>& block) {
  if (tensor.numel() == 0) return std::nullopt;
  const auto bytes = extent_of(tensor);
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  block = pinned_block(data, bytes);
  if (!block) return std::nullopt;
  const auto at = static_cast<size_t>(data - static_cast<const char*>(block->base));
  return Touch{&block->history, at, at + bytes, use};
}

void host_use(const at::Tensor& tensor, Use use, const std::string& what) {
  std::shared_ptr<PinnedBlock> block;
  if (auto range = pinned_range(tensor, use, block)) Detector::get().host_use(*range, what);
}

void set_pinned_limit(size_t bytes) {
  std::unique_lock lock(g_mutex);
  g_limit = bytes;
}

bool set_whole_pages(bool whole) {
  std::unique_lock lock(g_mutex);
  return std::exchange(g_whole_pages, whole);
}

std::vector<std::pair<uintptr_t, size_t>> pinned_ranges() {
  std::shared_lock lock(g_mutex);
  std::vector<std::pair<uintptr_t, size_t>> ranges;
  for (const auto& [base, block] : table()) ranges.emplace_back(base, block->bytes);
  return ranges;
}

void register_host(void* base, size_t bytes) {
  TORCH_CHECK_VALUE(bytes > 0, "there is nothing to register: the memory has 0 bytes");
  add(std::make_shared<PinnedBlock>(base, bytes, false));
}

void unregister_host(void* base) {
  auto block = remove(base, false);
  TORCH_CHECK_VALUE(block, "the host memory at ", base, " was not registered");
  // Its owner may free it the moment this returns. A host that waited for the copies finds them ended and known to be
  // so; one that did not is told, and then waits, rather than let a copy run into freed memory.
  const Touch whole{&block->history, 0, block->bytes, Use::Write};
  auto wait = [&] {
    while (block->copies > 0) sleep_until(seconds() + 1e-4);
  };
  try {
    Detector::get().host_use(whole, "unregistering the memory");
  } catch (...) {
    wait();
    throw;
  }
  wait();
}

REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &the_pinned_memory())

}  // namespace torch_virtual
