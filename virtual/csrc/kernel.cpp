#include "kernel.h"

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

namespace torch_virtual {

namespace {

// Beyond this many separate pieces a strided tensor counts as touching everything between its first and last byte.
constexpr int64_t kMostPieces = 64;

at::Tensor make_like(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

}  // namespace

void touch(const at::Tensor& tensor, Use use, c10::SmallVectorImpl<Touch>& touches) {
  if (tensor.numel() == 0) return;
  auto* block = block_of(tensor.storage().data_ptr());
  if (block == nullptr) return;
  const auto item = static_cast<int64_t>(tensor.itemsize());
  const auto base = static_cast<const char*>(tensor.storage().data()) - block->memory.address(*block);
  const int64_t first = base + tensor.storage_offset() * item;
  if (tensor.is_contiguous()) {
    touches.push_back({&block->history, size_t(first), size_t(first + tensor.numel() * item), use});
    return;
  }
  // Grow a run from the innermost dimensions; what is left are the pieces.
  c10::SmallVector<int64_t, 6> order;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != 0) order.push_back(d);
  }
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return tensor.stride(a) < tensor.stride(b); });
  int64_t run = 1, pieces = 1, extent = 1;
  c10::SmallVector<int64_t, 6> outer;
  for (auto d : order) {
    if (outer.empty() && tensor.stride(d) == run) {
      run *= tensor.size(d);
    } else {
      outer.push_back(d);
      pieces *= tensor.size(d);
    }
    extent += (tensor.size(d) - 1) * tensor.stride(d);
  }
  if (pieces > kMostPieces) {
    touches.push_back({&block->history, size_t(first), size_t(first + extent * item), use});
    return;
  }
  for (int64_t i = 0; i < pieces; ++i) {
    int64_t rest = i, at = 0;
    for (auto d : outer) {
      at += (rest % tensor.size(d)) * tensor.stride(d);
      rest /= tensor.size(d);
    }
    touches.push_back({&block->history, size_t(first + at * item), size_t(first + (at + run) * item), use});
  }
}

size_t extent_of(const at::Tensor& tensor) {
  int64_t items = tensor.numel() > 0 ? 1 : 0;
  for (int64_t d = 0; items > 0 && d < tensor.dim(); ++d) items += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<size_t>(items) * tensor.itemsize();
}

void refuse_emptied(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.numel() == 0 || tensor.storage().nbytes() > 0, "a tensor of shape ", tensor.sizes(), " on virtual:",
      int(tensor.get_device()), " is used, but its storage was emptied (resize_(0))");
}

void refuse_float64(c10::DeviceIndex index, c10::ScalarType dtype) {
  if (dtype != c10::kDouble && dtype != c10::kComplexDouble) return;
  TORCH_CHECK_TYPE(
      torch_virtual::device(index).has_float64, "virtual:", int(index), " was told to have no float64: convert the ",
      "tensor to float32 before it is moved there");
}

char* bytes_of(const at::Tensor& tensor) {
  auto* block = block_of(tensor.storage().data_ptr());
  if (block == nullptr) return nullptr;
  const auto into = static_cast<const char*>(tensor.storage().data()) - block->memory.address(*block);
  return block->memory.bytes(*block) + into + tensor.storage_offset() * tensor.itemsize();
}

c10::Storage Operands::host_storage(const c10::Storage& storage) {
  for (const auto& [ours, host] : storages_) {
    if (ours.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return host;
  }
  auto* block = block_of(storage.data_ptr());
  void* data = nullptr;
  if (block != nullptr) {
    data = block->memory.bytes(*block) + (static_cast<const char*>(storage.data()) - block->memory.address(*block));
  }
  c10::Storage host(
      c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, c10::Device(c10::kCPU)),
      c10::GetAllocator(c10::kCPU), /*resizable=*/true);
  storages_.emplace_back(storage, host);
  return host;
}

at::Tensor Operands::pair(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided, "virtual devices hold strided tensors only, this one is ", tensor.layout());
  const auto index = tensor.device().index();
  if (device_ < 0) device_ = index;
  TORCH_CHECK(
      device_ == index, "Expected all tensors to be on the same device, but found at least two devices, virtual:",
      int(device_), " and virtual:", int(index), "!");
  for (const auto& p : pairs_) {
    if (p.device.is_same(tensor)) return p.host;
  }
  refuse_float64(index, tensor.scalar_type());
  auto host = make_like(tensor, host_storage(tensor.storage()), c10::DispatchKey::CPU);
  pairs_.push_back({tensor, host});
  return host;
}

at::Tensor Operands::view(const at::Tensor& tensor, Use use) {
  refuse_emptied(tensor);
  auto host = pair(tensor);
  touch(tensor, use, touches_);
  return host;
}

at::Tensor Operands::view_untouched(const at::Tensor& tensor) {
  return pair(tensor);
}

at::Tensor Operands::wrap(const at::Tensor& result, Stream& stream, const Access& access) {
  if (!result.defined() || result.is_privateuseone()) return result;
  for (const auto& p : pairs_) {
    if (p.host.is_same(result)) return p.device;
  }
  auto storage = result.storage();
  for (const auto& [ours, host] : storages_) {
    if (host.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
      return make_like(result, ours, c10::DispatchKey::PrivateUse1);
    }
  }
  refuse_float64(stream.device, result.scalar_type());
  // New memory. The kernel allocated it on the device; only its name changes.
  const size_t bytes = storage.nbytes();
  const c10::Device where(c10::kPrivateUse1, stream.device);
  c10::DataPtr data(nullptr, where);
  if (bytes > 0) {
    auto host_data = storage.set_data_ptr(c10::DataPtr(storage.mutable_data(), c10::Device(c10::kCPU)));
    auto block = KernelMemory::take(host_data);
    if (!block) {  // a CPU tensor that outlives the kernel, such as a constant: the device gets a copy
      block = torch_virtual::device(stream.device).memory.allocate(bytes, stream);
      std::memcpy(block->memory.bytes(*block), host_data.get(), bytes);
      storage.set_data_ptr_noswap(std::move(host_data));
    }
    Detector::get().created(block->history, block->bytes, access);
    data = as_data_ptr(std::move(block));
  }
  c10::Storage ours(c10::Storage::use_byte_size_t(), bytes, std::move(data), &device_memory(), /*resizable=*/true);
  storages_.emplace_back(ours, storage);
  return make_like(result, ours, c10::DispatchKey::PrivateUse1);
}

void Operands::settle(const Access& access) {
  for (auto& [ours, host] : storages_) {
    auto* impl = ours.unsafeGetStorageImpl();
    auto block = KernelMemory::take(host.mutable_data_ptr());
    if (!block) continue;
    Detector::get().created(block->history, block->bytes, access);
    impl->set_data_ptr_noswap(as_data_ptr(std::move(block)));
    impl->set_nbytes(host.nbytes());
  }
  for (auto& p : pairs_) {
    if (p.device.sizes() == p.host.sizes() && p.device.strides() == p.host.strides() &&
        p.device.storage_offset() == p.host.storage_offset()) {
      continue;
    }
    p.device.unsafeGetTensorImpl()->set_sizes_and_strides(p.host.sizes(), p.host.strides(), p.host.storage_offset());
  }
}

}  // namespace torch_virtual
