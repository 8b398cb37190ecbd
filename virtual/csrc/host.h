// Pinned host memory: what copies may read and write behind the host's back.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "race.h"

namespace torch_virtual {

struct PinnedBlock {
  PinnedBlock(void* base, size_t bytes, bool owned) : base(base), bytes(bytes), owned(owned) {
    history.place = "pinned host memory";
  }
  ~PinnedBlock();

  void* const base;
  const size_t bytes;
  const bool owned;              // allocated here; else registered, and its owner's to free
  std::atomic<int> copies{0};    // asynchronous copies that have not ended
  History history;
};

c10::Allocator* pinned_memory();

// The pinned block that holds all of [address, address + bytes), or null.
std::shared_ptr<PinnedBlock> pinned_block(const void* address, size_t bytes);

// The smallest range of pinned memory that holds a host tensor; nothing where it is not pinned. `block` keeps it.
std::optional<Touch> pinned_range(const at::Tensor& tensor, Use use, std::shared_ptr<PinnedBlock>& block);
// The host itself reads or writes a host tensor.
void host_use(const at::Tensor& tensor, Use use, const std::string& what);

// Memory allocated elsewhere and declared fit for asynchronous copies: cudaHostRegister's part. The current device gets a
// context, and a system may allow only so much. No byte is pinned twice or, by whole pages, as on CUDA, no page.
void register_host(void* base, size_t bytes);
void unregister_host(void* base);
void set_pinned_limit(size_t bytes);  // of all pinned memory
bool set_whole_pages(bool whole);     // returns what was set before
std::vector<std::pair<uintptr_t, size_t>> pinned_ranges();

}  // namespace torch_virtual
