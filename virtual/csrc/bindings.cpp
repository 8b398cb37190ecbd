// What torch_virtual's Python side calls. Everything that PyTorch's own interfaces offer goes through those instead.

#include <algorithm>
#include <cstdlib>

#include <ATen/ATen.h>
#include <torch/extension.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "device.h"
#include "event.h"
#include "host.h"
#include "kernel.h"

namespace py = pybind11;

namespace torch_virtual {

namespace {

using Released = py::call_guard<py::gil_scoped_release>;

// The smallest range of its allocation that holds a tensor; nothing for host memory that is not pinned.
std::optional<Touch> range_of(const at::Tensor& tensor, Use use, std::shared_ptr<PinnedBlock>& pinned) {
  if (!tensor.is_privateuseone()) return pinned_range(tensor, use, pinned);
  if (tensor.numel() == 0) return std::nullopt;
  refuse_emptied(tensor);
  auto* block = block_of(tensor.storage().data_ptr());
  const auto at = static_cast<size_t>(bytes_of(tensor) - block->memory.bytes(*block));
  return Touch{&block->history, at, at + extent_of(tensor), use};
}

void label(const at::Tensor& tensor, const std::string& name) {
  std::shared_ptr<PinnedBlock> pinned;
  if (auto range = range_of(tensor, Use::Read, pinned)) {
    Detector::get().label(*range->history, range->lo, range->hi, name);
  }
}

void host_uses(const at::Tensor& tensor, bool writes, const std::string& what) {
  TORCH_CHECK_VALUE(tensor.is_cpu(), "the host reads and writes host memory; this tensor is on ", tensor.device());
  host_use(tensor, writes ? Use::Write : Use::Read, what);
}

void register_tensor(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.is_cpu() && tensor.is_contiguous(), "a contiguous host tensor is required to register its memory");
  register_host(tensor.mutable_data_ptr(), tensor.nbytes());
}

// Some virtual machines advertise AMX and kill the process that uses it, as oneDNN does in bf16. A stand-in for an
// accelerator has no need of AMX, so where it is advertised oneDNN is told to stop below it.
void avoid_amx() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTiles = 1u << 24;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTiles)) {
    setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16", /*overwrite=*/0);
  }
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  avoid_amx();

  m.def("device_count", &device_count);
  m.def("set_device_count", [](int count) {
    set_device_count(static_cast<c10::DeviceIndex>(std::clamp(count, -1, 127)));  // what an index can hold
  });
  m.def("forked", &forked);
  m.def("capacity", [](int i) { return device(i).memory.capacity(); });
  m.def("set_capacity", [](int i, size_t bytes) { device(i).memory.set_capacity(bytes); });

  m.def("fraction", [](int i) { return device(i).memory.fraction(); });
  m.def("set_fraction", [](int i, double fraction) { device(i).memory.set_fraction(fraction); });
  m.def("caching", [](int i) {
    const auto c = device(i).memory.caching();
    return std::make_tuple(c.rounding, c.small_segment, c.large_segment);
  });
  m.def("set_caching", [](int i, size_t rounding, size_t small, size_t large) {
    device(i).memory.set_caching({rounding, small, large});
  });

  m.def("workspace", [](int i) { return device(i).workspaces.size(); });
  m.def("set_workspace", [](int i, size_t bytes) { device(i).workspaces.set_size(bytes); }, Released());
  m.def("has_float64", [](int i) { return device(i).has_float64.load(); });
  m.def("set_float64", [](int i, bool has) { device(i).has_float64 = has; });
  m.def("set_unkind", &set_unkind);
  m.def("contexts", [] {
    std::vector<int> used;
    for (int i = 0; i < device_count(); ++i) {
      if (device_if_used(static_cast<c10::DeviceIndex>(i))) used.push_back(i);
    }
    return used;
  });
  m.def("streams_in_use", [](int i) { return device(i).streams().size(); });
  m.def("spinning_waits", &spinning_waits);
  m.def("set_pinned_limit", &set_pinned_limit);
  m.def("set_whole_pages", &set_whole_pages);
  m.def("pinned_ranges", &pinned_ranges);

  py::class_<Event, std::shared_ptr<Event>>(m, "Event")
      .def(py::init<bool>())
      .def("record", [](Event& e, int d, int64_t s) { e.record(device(d).stream(s)); }, Released())
      .def("wait", [](Event& e, int d, int64_t s) { e.block(device(d).stream(s)); }, Released())
      .def("query", &Event::query, Released())
      .def("synchronize", &Event::synchronize, Released())
      .def("elapsed_time", &Event::elapsed, Released());

  py::class_<Link::Settings>(m, "LinkSettings")
      .def_property_readonly("h2d", [](const Link::Settings& s) { return s.bandwidth[0]; })
      .def_property_readonly("d2h", [](const Link::Settings& s) { return s.bandwidth[1]; })
      .def_readonly("latency", &Link::Settings::latency)
      .def_readonly("delay", &Link::Settings::delay);
  m.def("link", [](int i) { return device(i).link.settings(); });
  m.def("set_link", [](int i, double h2d, double d2h, double latency, double delay) {
    device(i).link.set({{h2d, d2h}, latency, delay});
  });
  m.def("traffic", [](int i) {
    const auto t = device(i).link.traffic();
    return std::make_tuple(t.bytes[0], t.bytes[1], t.copies[0], t.copies[1], t.blocking);
  });

  m.def("race_count", [] { return Detector::get().count(); }, Released());
  m.def("races", [] { return Detector::get().reports(); }, Released());
  m.def("clear_races", [] { Detector::get().clear(); }, Released());
  m.def("is_strict", [] { return Detector::get().strict(); });
  m.def("set_strict", [](bool strict) { return Detector::get().set_strict(strict); }, Released());
  m.def("label", &label, Released());
  m.def("host_use", &host_uses, Released());

  py::class_<Clock>(m, "Instant", "What a host thread knew to be over at some point, to be handed to another.");
  m.def("push_host_clock", [](const std::string& name) { Detector::get().push_host_clock(name); }, Released());
  m.def("pop_host_clock", [] { Detector::get().pop_host_clock(); }, Released());
  m.def("now", [] { return Detector::get().now(); }, Released());
  m.def("learn", [](const Clock& instant) { Detector::get().host_wait(instant); }, Released());

  m.def("register_host", &register_tensor, Released());
  m.def("unregister_host", [](const at::Tensor& t) { unregister_host(t.mutable_data_ptr()); }, Released());

  m.def("generator", [](int i) { return device(i).generator; });
}

}  // namespace torch_virtual
