// What PyTorch asks of a device: c10's guard (devices, streams, events) and ATen's hooks.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.h"
#include "event.h"
#include "generator.h"
#include "host.h"
#include "storage.h"

namespace torch_virtual {

namespace {

c10::Stream as_torch(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, stream.device), stream.id);
}

Stream& as_ours(const c10::Stream& stream) {
  return device(stream.device_index()).stream(stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto from = getDevice();
    setDevice(to);
    return from;
  }
  c10::Device getDevice() const override { return {c10::kPrivateUse1, current_device()}; }
  void setDevice(c10::Device to) const override {
    if (to.index() >= 0) set_current_device(to.index());
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0 && to.index() < device_count()) set_current_device(to.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device of) const override { return as_torch(current_stream(of.index())); }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return as_torch(device(of.index() < 0 ? current_device() : of.index()).stream(kDefaultStream));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return as_torch(device(of.index() < 0 ? current_device() : of.index()).next_stream());
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto from = getStream(to.device());
    set_current_stream(to.device_index(), to.id());
    return from;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &as_ours(stream); }
  bool queryStream(const c10::Stream& stream) const override { return as_ours(stream).query(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (!as_ours(stream).query()) count_spinning_wait();
    as_ours(stream).synchronize();
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    count_spinning_wait();
    device(index).synchronize();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event(flag == c10::EventFlag::BACKEND_DEFAULT);
    static_cast<Event*>(*event)->record(as_ours(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) static_cast<Event*>(event)->block(as_ours(stream));
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Event*>(event)->query(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<Event*>(event)->synchronize(/*spins=*/true);
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK_VALUE(from != nullptr && to != nullptr, "both events must be recorded before their times are compared");
    return static_cast<Event*>(from)->elapsed(*static_cast<Event*>(to));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  // Autograd asks, so that it looks for streams only on devices in use.
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return device_if_used(index) != nullptr; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto from = current_device();
    set_current_device(index);
    return from;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return device(index < 0 ? current_device() : index).generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return make_generator(index < 0 ? current_device() : index);
  }
  c10::Device getDeviceFromPtr(void* data) const override { return {c10::kPrivateUse1, device_of(data)}; }
  bool isPinnedPtr(const void* data) const override { return pinned_block(data, 1) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

}  // namespace torch_virtual
