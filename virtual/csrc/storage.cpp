#include "storage.h"

#include <cstring>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "kernel.h"

namespace torch_virtual {

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  const auto index = storage.device().index();
  auto& stream = current_stream(index);
  c10::DataPtr data(nullptr, storage.device());
  if (bytes > 0) {
    auto block = device(index).memory.allocate(bytes, stream);
    auto* old = block_of(storage.data_ptr());
    const size_t kept = std::min(bytes, storage.nbytes());
    if (old != nullptr && kept > 0) {
      const Touch touches[] = {
          {&old->history, 0, kept, Use::Read},
          {&block->history, 0, kept, Use::Write},
      };
      KernelTurn turn(stream, [&] { Detector::get().launch(stream.actor, {"resize"}, touches, 2); });
      std::memcpy(block->memory.bytes(*block), old->memory.bytes(*old), kept);
    }
    data = as_data_ptr(std::move(block));
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

namespace {

void check_options(
    std::optional<c10::Layout> layout, std::optional<c10::Device> where, std::optional<bool> pinned) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      c10::layout_or_default(layout) == c10::kStrided, "virtual devices hold strided tensors only, not ", *layout);
  TORCH_CHECK_VALUE(!c10::pinned_memory_or_default(pinned), "only host memory can be pinned, not memory of ", *where);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> where, std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  check_options(layout, where, pinned);
  const c10::DeviceGuard guard(c10::device_or_default(where));
  refuse_float64(current_device(), c10::dtype_or_default(dtype));
  return at::detail::empty_generic(
      size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> where, std::optional<bool> pinned) {
  check_options(layout, where, pinned);
  const c10::DeviceGuard guard(c10::device_or_default(where));
  refuse_float64(current_device(), c10::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Zeros without memory, which forward-mode differentiation makes. PyTorch's own fallback replaces them where an operator
// needs their values.
at::Tensor efficient_zeros(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> where, std::optional<bool> pinned) {
  check_options(layout, where, pinned);
  const c10::DeviceGuard guard(c10::device_or_default(where));
  refuse_float64(current_device(), c10::dtype_or_default(dtype));
  at::native::ZeroTensorAllocator nothing(c10::Device(c10::kPrivateUse1, current_device()));
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &nothing, keys, c10::dtype_or_default(dtype), std::nullopt);
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

void make_room(const at::Tensor& self) {
  const size_t needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.itemsize(), static_cast<size_t>(self.storage_offset()));
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (self.numel() > 0 && needed > storage->nbytes()) resize_storage(*storage, needed);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  make_room(self);
  return self;
}

at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  if (stride.data() == nullptr) {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  }
  make_room(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.itemsize());
  const int64_t sizes[] = {items}, strides[] = {1};
  return set_storage_at(self, std::move(source), 0, sizes, strides);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_memory().allocate(0), &device_memory(), true);
  return set_storage_at(self, std::move(none), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

// Lets Module.to() move a parameter's data in place; else it would make new parameters, and untie shared ones.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto plain = [](const at::Tensor& t) { return t.layout() == c10::kStrided && (t.is_cpu() || t.is_privateuseone()); };
  return plain(self) && plain(from);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zeros);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

}  // namespace

}  // namespace torch_virtual
