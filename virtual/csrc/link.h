// The link between host and device: two directions, each with its own bandwidth, used at the same time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace torch_virtual {

enum class Direction : uint8_t { HostToDevice = 0, DeviceToHost = 1 };

class Link {
 public:
  struct Settings {
    std::array<double, 2> bandwidth{0, 0};  // bytes per second by direction; 0: as fast as memory
    double latency = 0;                     // seconds added to each copy; copies of several streams overlap in it
    double delay = 0;                       // seconds before each asynchronous copy begins, to make missing waits show
  };
  struct Traffic {
    std::array<uint64_t, 2> bytes{0, 0};
    std::array<uint64_t, 2> copies{0, 0};
    uint64_t blocking = 0;  // copies that the host waited for
  };

  Settings settings();
  void set(const Settings& settings);
  Traffic traffic();

  void count(Direction direction, uint64_t bytes, bool blocking);
  // Moves the bytes at the pace of `settings`, the link's when the copy was asked for. `ready` is when it could have
  // begun; returns when it ended, which is the link's time and not the thread's, so that late wake-ups do not add up
  // over many copies.
  double carry(
      Direction direction, const Settings& settings, void* to, const void* from, uint64_t bytes, double ready);

 private:
  std::mutex mutex_;
  Settings settings_;
  Traffic traffic_;
  std::array<double, 2> free_at_{0, 0};
};

}  // namespace torch_virtual
