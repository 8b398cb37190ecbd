// Running the CPU's operators on device memory, in place.
#pragma once

#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include "device.h"
#include "memory.h"
#include "race.h"

namespace torch_virtual {

// A kernel's tensors: each device tensor beside a CPU tensor over the same bytes, and what the kernel touches.
class Operands {
 public:
  // The CPU's view of a device tensor. All tensors of a kernel are on one device.
  at::Tensor view(const at::Tensor& tensor, Use use);
  // The same, for an operator that looks only at sizes and strides.
  at::Tensor view_untouched(const at::Tensor& tensor);

  // After the kernel: the device's tensor for one of its results.
  at::Tensor wrap(const at::Tensor& result, Stream& stream, const Access& access);
  // After the kernel: arguments that it resized, and their new memory.
  void settle(const Access& access);

  c10::DeviceIndex device() const { return device_; }
  const c10::SmallVectorImpl<Touch>& touches() const { return touches_; }

 private:
  struct Pair {
    at::Tensor device, host;
  };
  at::Tensor pair(const at::Tensor& tensor);
  c10::Storage host_storage(const c10::Storage& storage);

  c10::DeviceIndex device_ = -1;
  c10::SmallVector<Pair, 6> pairs_;
  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 6> storages_;  // device, host
  c10::SmallVector<Touch, 6> touches_;
};

// The bytes of a device tensor's elements, as touches of its allocation.
void touch(const at::Tensor& tensor, Use use, c10::SmallVectorImpl<Touch>& touches);

// Bytes from a tensor's first to its last.
size_t extent_of(const at::Tensor& tensor);

// Where kernels and copies find the bytes of a device tensor's first element.
char* bytes_of(const at::Tensor& tensor);

// Where the device was told to have none.
void refuse_float64(c10::DeviceIndex index, c10::ScalarType dtype);

// A kernel or copy would follow a null pointer.
void refuse_emptied(const at::Tensor& tensor);

// Runs `body` in its stream's turn, after the race check, with device memory behind the CPU's allocator.
template <typename Body>
Access run_kernel(Stream& stream, Operation what, const Operands& operands, Body body) {
  const auto& touches = operands.touches();
  Access access;
  KernelTurn turn(stream, [&] { access = Detector::get().launch(stream.actor, what, touches.data(), touches.size()); });
  KernelMemory memory(stream);
  body();
  return access;
}

}  // namespace torch_virtual
