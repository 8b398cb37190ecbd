// Monotonic time in seconds, and sleeping that does not burn a core.
#pragma once

#include <cerrno>
#include <cmath>
#include <ctime>

namespace torch_virtual {

inline double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

inline void sleep_until(double when) {
  double whole;
  const double fraction = std::modf(when, &whole);
  timespec t{static_cast<time_t>(whole), static_cast<long>(fraction * 1e9)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, nullptr) == EINTR) {
  }
}

}  // namespace torch_virtual
