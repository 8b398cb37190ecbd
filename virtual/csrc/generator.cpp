#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/TensorImpl.h>

#include "device.h"

namespace torch_virtual {

VirtualGenerator::VirtualGenerator(c10::DeviceIndex device, uint64_t seed)
    : GeneratorImpl(
          c10::Device(c10::kPrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      inside(at::detail::createCPUGenerator(seed)) {}

// Kernels on other threads draw under the inner generator's lock, so everything here takes it too.

void VirtualGenerator::set_current_seed(uint64_t seed) {
  std::lock_guard lock(inside.mutex());
  inside.set_current_seed(seed);
}

void VirtualGenerator::set_offset(uint64_t offset) {
  std::lock_guard lock(inside.mutex());
  inside.set_offset(offset);
}

uint64_t VirtualGenerator::get_offset() const {
  return inside.get_offset();
}

uint64_t VirtualGenerator::current_seed() const {
  return inside.current_seed();
}

uint64_t VirtualGenerator::seed() {
  std::lock_guard lock(inside.mutex());
  return inside.seed();
}

void VirtualGenerator::set_state(const c10::TensorImpl& state) {
  std::lock_guard lock(inside.mutex());
  inside.unsafeGetGeneratorImpl()->set_state(state);
}

c10::intrusive_ptr<c10::TensorImpl> VirtualGenerator::get_state() const {
  std::lock_guard lock(inside.mutex());
  return inside.unsafeGetGeneratorImpl()->get_state();
}

VirtualGenerator* VirtualGenerator::clone_impl() const {
  auto* copy = new VirtualGenerator(device_.index());
  copy->set_state(*get_state());
  return copy;
}

at::Generator make_generator(c10::DeviceIndex device) {
  return at::make_generator<VirtualGenerator>(device);
}

at::Generator generator_inside(const std::optional<at::Generator>& given, c10::DeviceIndex index) {
  const auto& outer = given.has_value() && given->defined() ? *given : device(index).generator;
  TORCH_CHECK_VALUE(
      outer.device().type() == c10::kPrivateUse1 && outer.device().index() == index,
      "a generator on virtual:", int(index), " is required here, this one is on ", outer.device());
  return static_cast<VirtualGenerator*>(outer.unsafeGetGeneratorImpl())->inside;
}

}  // namespace torch_virtual
