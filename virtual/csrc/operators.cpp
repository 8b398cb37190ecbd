// Every operator that the CPU has, on the device: one boxed kernel, registered for all of them.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "generator.h"
#include "kernel.h"

namespace torch_virtual {

namespace {

// Arguments that may be CPU tensors, as they may on CUDA: numbers, indices and lengths.
bool may_be_on_cpu(const at::Tensor& tensor, const c10::Argument& argument, const std::string& op) {
  if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) return false;
  if (tensor.dim() == 0) return true;
  for (const char* prefix : {"aten::index", "aten::_index_put", "aten::_unsafe_index"}) {
    if (op.rfind(prefix, 0) == 0 && argument.name() == "indices") return true;
  }
  return op.rfind("aten::_pack_padded", 0) == 0 && argument.name() == "lengths";
}

// An operator that only makes views: it touches no memory, so it waits for none.
bool only_views(const c10::FunctionSchema& schema) {
  bool any = false;
  for (const auto& argument : schema.arguments()) {
    if (argument.type()->kind() != c10::TypeKind::TensorType) continue;
    const auto* alias = argument.alias_info();
    if (alias == nullptr || alias->isWrite()) return false;
    any = true;
  }
  return any;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack), views_only_(only_views(schema_)) {}

  void run() {
    find_device();
    const auto begin = stack_.size() - schema_.arguments().size();
    for (size_t i = 0; i < schema_.arguments().size(); ++i) translate(stack_[begin + i], schema_.arguments()[i]);
    auto& stream = current_stream(device_);
    if (is_matrix_product(schema_.name())) device(device_).workspaces.use(stream);
    const Operation what{schema_.name().c_str(), schema_.overload_name().c_str()};
    Access access;
    if (views_only_) {
      call();
    } else {
      access = run_kernel(stream, what, operands_, [&] { call(); });
      operands_.settle(access);
    }
    const auto results = stack_.size() - schema_.returns().size();
    bool on_host = false;
    for (size_t i = results; i < stack_.size(); ++i) on_host |= !give_back(stack_[i], stream, access);
    // A number or a truth value can only be known to a host that has waited.
    if (on_host && !views_only_) stream.synchronize();
  }

 private:
  void find_device() {
    auto look = [&](const at::Tensor& t) {
      if (device_ < 0 && t.defined() && t.is_privateuseone()) device_ = t.device().index();
    };
    for (size_t i = stack_.size() - schema_.arguments().size(); i < stack_.size(); ++i) {
      const auto& value = stack_[i];
      if (value.isTensor()) {
        look(value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& t : value.toTensorList()) look(t);
      } else if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
          if (t.has_value()) look(*t);
        }
      } else if (value.isDevice() && value.toDevice().is_privateuseone() && value.toDevice().has_index()) {
        if (device_ < 0) device_ = value.toDevice().index();
      }
    }
    if (device_ < 0) device_ = current_device();
  }

  at::Tensor host(const at::Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      TORCH_CHECK(
          may_be_on_cpu(tensor, argument, schema_.name()), "Expected all tensors to be on the same device, but ",
          "found at least two devices, virtual:", int(device_), " and ", tensor.device(), "! (argument '",
          argument.name(), "' of ", schema_.name(), ")");
      return tensor;
    }
    if (views_only_) return operands_.view_untouched(tensor);
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    return operands_.view(tensor, written ? Use::Write : Use::Read);
  }

  void translate(c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      value = host(value.toTensor(), argument);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorList()) list.push_back(host(t, argument));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList()) {
        list.push_back(t.has_value() ? std::optional<at::Tensor>(host(*t, argument)) : std::nullopt);
      }
      value = std::move(list);
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    } else if (is_generator(*argument.type())) {
      value = generator_inside(value.toOptional<at::Generator>(), device_);
    }
  }

  static bool is_generator(const c10::Type& type) {
    if (type.kind() == c10::TypeKind::GeneratorType) return true;
    const auto* optional = type.castRaw<c10::OptionalType>();
    return optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  void call() {
    // The views are plain CPU tensors: nothing above the CPU's own kernel may see them a second time.
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
  }

  // True where the result is a tensor of the device; false where it is a value that the host now has.
  bool give_back(c10::IValue& value, Stream& stream, const Access& access) {
    if (value.isTensor()) {
      value = operands_.wrap(value.toTensor(), stream, access);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorList()) list.push_back(operands_.wrap(t, stream, access));
      value = std::move(list);
    } else {
      return value.isNone();
    }
    return true;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const bool views_only_;
  c10::DeviceIndex device_ = -1;
  Operands operands_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

// Random numbers without a generator argument would come from the CPU's own. This is the one such operator that
// models use; the arithmetic is that of the CPU's dropout, so that equal seeds give equal results.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  if (p == 1) return {at::zeros_like(input), at::zeros_like(input, at::kBool)};
  auto noise = at::empty_like(input).bernoulli_(1 - p);
  auto mask = noise.to(at::kBool);
  return {input * noise.div_(1 - p), mask};
}

at::Tensor native_dropout_backward(const at::Tensor& gradient, const at::Tensor& mask, double scale) {
  return gradient * mask.to(gradient.scalar_type()).div_(1 / scale);  // the noise, rounded as it was on the way forward
}

// The CPU counts floating point only; accelerators count integers too, and models rely on it (experts).
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  const auto values = self.is_floating_point() ? self : self.to(at::kDouble);
  auto counts = at::empty({bins}, values.options());
  return at::histc_out(counts, values, bins, min, max).to(self.scalar_type());
}

// The CPU's own choice, so that the same attention runs.
int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  Operands operands;
  auto host = [&](const at::Tensor& t) {
    return operands.view_untouched(t).set_requires_grad(t.requires_grad() && at::GradMode::is_enabled());
  };
  std::optional<at::Tensor> host_mask;
  if (mask.has_value() && mask->defined()) host_mask = host(*mask);
  return at::_fused_sdp_choice(host(query), host(key), host(value), host_mask, dropout, causal, scale, grouped);
}

// Operators that are composed of others and ask for the CPU or CUDA by name on the way.
constexpr const char* kWholeOnCpu[] = {
    "aten::convolution", "aten::convolution_backward", "aten::_convolution", "aten::_fused_sdp_choice",
};

// Those with kernels of their own in this package, and random ones that take no generator.
bool has_own_kernel(const std::string& name) {
  static const std::unordered_set<std::string> own = {
      "aten::empty.memory_format", "aten::empty_strided", "aten::_efficientzerotensor", "aten::as_strided", "aten::view",
      "aten::_reshape_alias",
      "aten::resize_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
      "aten::set_.source_Tensor", "aten::set_", "aten::_copy_from", "aten::_copy_from_and_resize",
      "aten::_local_scalar_dense", "aten::native_dropout", "aten::native_dropout_backward", "aten::histc",
      "aten::record_stream", "aten::_has_compatible_shallow_copy_type",
  };
  return own.count(name) > 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // Registered by name, not left to the fallback: an operator that PyTorch could compose of others would else take
  // another way here than on the CPU, with other rounding.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto full = c10::toString(name);
    auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema() || has_own_kernel(full)) continue;
    const bool whole = std::find(std::begin(kWholeOnCpu), std::end(kWholeOnCpu), full) != std::end(kWholeOnCpu);
    if (!whole && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  m.impl("native_dropout", &native_dropout);
  m.impl("native_dropout_backward", &native_dropout_backward);
  m.impl("histc", &histc);
}

}  // namespace

}  // namespace torch_virtual

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &torch_virtual::choose_attention)
}
