#include "link.h"

#include <algorithm>
#include <cstring>

#include "clock.h"

namespace torch_virtual {

namespace {

// Copies are paced piece by piece, so that what has arrived grows as it would on a real link.
constexpr uint64_t kPieceBytes = 1 << 20;
constexpr double kPieceSeconds = 1e-3;
constexpr double kMemoryRate = 8e9;  // bytes per second, roughly: how long before its time a piece must begin
constexpr double kLateness = 20e-3;  // a thread may wake so late and still catch up; beyond, the link's time gives way

}  // namespace

Link::Settings Link::settings() {
  std::lock_guard lock(mutex_);
  return settings_;
}

void Link::set(const Settings& settings) {
  std::lock_guard lock(mutex_);
  settings_ = settings;
}

Link::Traffic Link::traffic() {
  std::lock_guard lock(mutex_);
  return traffic_;
}

void Link::count(Direction direction, uint64_t bytes, bool blocking) {
  std::lock_guard lock(mutex_);
  const auto d = static_cast<size_t>(direction);
  traffic_.bytes[d] += bytes;
  traffic_.copies[d] += 1;
  if (blocking) ++traffic_.blocking;
}

double Link::carry(
    Direction direction, const Settings& settings, void* to, const void* from, uint64_t bytes, double ready) {
  const auto d = static_cast<size_t>(direction);
  const double rate = settings.bandwidth[d], latency = settings.latency;
  double start;
  {
    std::lock_guard lock(mutex_);
    start = std::max(ready, free_at_[d]);
    if (rate > 0) free_at_[d] = start + static_cast<double>(bytes) / rate;
  }
  if (rate <= 0) {
    std::memcpy(to, from, bytes);
    if (latency <= 0) return seconds();
    const double end = std::max(seconds(), ready) + latency;
    sleep_until(end);
    return end;
  }
  const auto piece = std::max(kPieceBytes, static_cast<uint64_t>(rate * kPieceSeconds));
  double end = start, moving = 0;
  for (uint64_t done = 0; done < bytes;) {
    const auto n = std::min(piece, bytes - done);
    end = start + static_cast<double>(done + n) / rate;
    // A piece arrives when its time is over, not when it begins: a reader that did not wait finds old bytes.
    const double begin = end - static_cast<double>(n) / kMemoryRate;
    if (seconds() < begin) sleep_until(begin);
    const double began = seconds();
    std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, n);
    moving += seconds() - began;
    done += n;
  }
  // Memory may be slower than the link. A late wake-up is neither's fault: the copies that follow make up for it.
  end = std::max({end, start + moving, seconds() - kLateness});
  {
    std::lock_guard lock(mutex_);
    free_at_[d] = std::max(free_at_[d], end);
  }
  end += latency;
  if (seconds() < end) sleep_until(end);
  return end;
}

}  // namespace torch_virtual
