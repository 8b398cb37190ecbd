#include "event.h"

#include <c10/util/Exception.h>

namespace torch_virtual {

namespace {

std::atomic<uint64_t> g_spinning{0};

}  // namespace

uint64_t spinning_waits() {
  return g_spinning;
}

void count_spinning_wait() {
  ++g_spinning;
}

std::shared_ptr<Moment> Event::latest() {
  std::lock_guard lock(mutex_);
  return moment_;
}

void Event::record(Stream& stream) {
  auto moment = stream.record();
  std::lock_guard lock(mutex_);
  moment_ = std::move(moment);
}

void Event::block(Stream& stream) {
  if (auto moment = latest()) stream.wait(moment);  // never recorded: nothing to wait for, as on CUDA
}

bool Event::query() {
  auto moment = latest();
  if (!moment) return true;
  if (!moment->passed()) return false;
  Detector::get().host_wait(moment->clock);
  return true;
}

void Event::synchronize(bool spins) {
  auto moment = latest();
  if (!moment) return;
  if (spins && !moment->passed()) count_spinning_wait();
  moment->wait();
  Detector::get().host_wait(moment->clock);
}

double Event::elapsed(Event& to) {
  TORCH_CHECK_VALUE(timed && to.timed, "events whose times are compared must be made with enable_timing=True");
  auto begin = latest(), end = to.latest();
  TORCH_CHECK_VALUE(begin && end, "both events must be recorded before their times are compared");
  TORCH_CHECK_VALUE(
      begin->passed() && end->passed(), "both events must have passed before their times are compared: synchronize");
  return (end->wait() - begin->wait()) * 1e3;
}

}  // namespace torch_virtual
