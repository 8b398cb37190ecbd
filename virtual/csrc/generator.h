// The device's own random numbers, apart from the CPU's.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace torch_virtual {

// A CPU generator under the device's name: kernels are the CPU's, so they draw from the one inside.
struct VirtualGenerator final : c10::GeneratorImpl {
  explicit VirtualGenerator(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  mutable at::Generator inside;  // locked, also to read it

 private:
  VirtualGenerator* clone_impl() const override;
};

at::Generator make_generator(c10::DeviceIndex device);

// The CPU generator that a kernel on `device` draws from: inside the given one, or inside the device's own.
at::Generator generator_inside(const std::optional<at::Generator>& given, c10::DeviceIndex device);

}  // namespace torch_virtual
