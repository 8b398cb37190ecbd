// Copies: across the link, within a device, and from one device to another.

#include <cstring>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "clock.h"
#include "device.h"
#include "host.h"
#include "kernel.h"

namespace torch_virtual {

namespace {

constexpr const char* kNames[] = {"copy host to device", "copy device to host"};

// One run of bytes over the link. Asynchronous copies run on the stream's thread and keep both ends alive.
void transfer(
    Direction direction, const at::Tensor& on_device, void* host, size_t bytes, bool asynchronous,
    const std::shared_ptr<PinnedBlock>& pinned) {
  if (bytes == 0) return;
  refuse_emptied(on_device);
  const bool in = direction == Direction::HostToDevice;
  auto& link = device(on_device.device().index()).link;
  auto& stream = current_stream(on_device.device().index());
  auto* block = block_of(on_device.storage().data_ptr());
  char* there = bytes_of(on_device);

  Touch touches[2];
  const auto at = static_cast<size_t>(there - block->memory.bytes(*block));
  touches[0] = {&block->history, at, at + bytes, in ? Use::Write : Use::Read};
  if (pinned) {
    const auto from = static_cast<size_t>(static_cast<char*>(host) - static_cast<char*>(pinned->base));
    touches[1] = {&pinned->history, from, from + bytes, in ? Use::Read : Use::Write};
  }
  const char* name = kNames[static_cast<int>(direction)];
  const auto settings = link.settings();
  Clock after;
  auto launch = [&] {
    Detector::get().launch(stream.actor, {name}, touches, pinned ? 2 : 1);
    after = Detector::get().clock_of(stream.actor);
    link.count(direction, bytes, !asynchronous);
    if (asynchronous) ++pinned->copies;
  };

  void* to = in ? there : host;
  const void* from = in ? host : there;
  if (!asynchronous) {
    {
      KernelTurn turn(stream, launch);
      link.carry(direction, settings, to, from, bytes, seconds());
    }
    Detector::get().host_wait(after);
    return;
  }
  auto keep = BlockPtr::unsafe_reclaim_from_nonowning(block);
  auto work = [=, &link](double ready) {
    if (settings.delay > 0) sleep_until(ready += settings.delay);
    const double end = link.carry(direction, settings, to, from, bytes, ready);
    (void)keep;
    --pinned->copies;
    return end;
  };
  stream.enqueue(std::move(work), launch);
}

// True when the elements of both lie in memory in the same order and without gaps, so that their bytes can be moved
// as one run.
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return a.is_non_overlapping_and_dense() && a.dtype() == b.dtype() && a.is_conj() == b.is_conj() &&
      a.is_neg() == b.is_neg();
}

void host_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.is_non_overlapping_and_dense()) {
    auto dense = at::empty(to.sizes(), to.options());
    host_to_device(from, dense, non_blocking);
    to.copy_(dense);
    return;
  }
  auto source = from;
  if (!same_layout(from, to)) {  // the host converts, then copies what arrives
    host_use(from, Use::Read, "the host's part of a copy to the device");
    source = at::empty_strided(to.sizes(), to.strides(), to.options().device(c10::kCPU)).copy_(from);
  }
  const auto bytes = source.nbytes();
  auto* data = static_cast<char*>(source.mutable_data_ptr());
  auto pinned = pinned_block(data, bytes);
  transfer(Direction::HostToDevice, to, data, bytes, non_blocking && pinned, pinned);
}

void device_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.is_non_overlapping_and_dense()) {
    auto dense = at::empty(to.sizes(), to.options());
    device_to_host(from, dense, false);
    host_use(to, Use::Write, "the host's part of a copy from the device");
    to.copy_(dense);
    return;
  }
  auto source = from;
  if (!same_layout(from, to)) {  // the device converts, then what will be kept crosses
    source = at::empty_strided(to.sizes(), to.strides(), to.options().device(from.device())).copy_(from);
  }
  const auto bytes = source.nbytes();
  auto* data = static_cast<char*>(to.mutable_data_ptr());
  auto pinned = pinned_block(data, bytes);
  transfer(Direction::DeviceToHost, source, data, bytes, non_blocking && pinned, pinned);
}

void within_device(const at::Tensor& from, const at::Tensor& to) {
  Operands operands;
  auto source = operands.view(from, Use::Read), target = operands.view(to, Use::Write);
  auto& stream = current_stream(to.device().index());
  run_kernel(stream, {"copy within the device"}, operands, [&] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    target.copy_(source);
  });
}

// As on CUDA, such a copy is ordered with the current streams of both devices.
void between_devices(const at::Tensor& from, const at::Tensor& to) {
  auto &source_stream = current_stream(from.device().index()), &target_stream = current_stream(to.device().index());
  target_stream.wait(source_stream.record());
  Operands sources, targets;
  auto source = sources.view(from, Use::Read), target = targets.view(to, Use::Write);
  c10::SmallVector<Touch, 4> touches(sources.touches().begin(), sources.touches().end());
  touches.append(targets.touches().begin(), targets.touches().end());
  {
    KernelTurn turn(target_stream, [&] {
      Detector::get().launch(target_stream.actor, {"copy between devices"}, touches.data(), touches.size());
    });
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    target.copy_(source);
  }
  source_stream.wait(target_stream.record());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0 || self.is_same(dst)) return dst;
  const auto from = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  if (from.is_cpu()) {
    host_to_device(from, dst, non_blocking);
  } else if (dst.is_cpu()) {
    device_to_host(from, dst, non_blocking);
  } else if (from.device() == dst.device()) {
    within_device(from, dst);
  } else {
    between_devices(from, dst);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  auto host = at::empty({}, self.options().device(c10::kCPU));
  device_to_host(self, host, false);
  return host.item();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
}

// Copies resolve conjugate and negative views themselves. PyTorch's way would be a clone first, which is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace

}  // namespace torch_virtual
