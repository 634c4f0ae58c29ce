#include "devices.h"

#include <c10/util/Exception.h>
#include <pthread.h>

namespace vdev {
namespace {

std::atomic<int> enabled_devices{0};
std::atomic<bool> strict_flag{false};
std::atomic<bool> forked{false};
thread_local c10::DeviceIndex current_index = 0;
std::array<Counters, kMaxDevices> all_counters;
std::array<std::array<std::atomic<int64_t>, kMaxDevices>, kMaxDevices> all_routes{};

}  // namespace

c10::DeviceIndex device_count() noexcept {
  return static_cast<c10::DeviceIndex>(enabled_devices.load(std::memory_order_relaxed));
}

void set_device_count(int count) {
  TORCH_CHECK_VALUE(
      count >= 1 && count <= kMaxDevices,
      "the number of virtual devices must be between 1 and ", kMaxDevices, ", got ", count);
  enabled_devices.store(count);
}

c10::DeviceIndex current_device() noexcept {
  return current_index;
}

void set_current_device(c10::DeviceIndex index) noexcept {
  current_index = index;
}

c10::DeviceIndex checked_index(c10::DeviceIndex index) {
  if (index == -1) {
    return current_index;
  }
  TORCH_CHECK(
      index >= 0 && index < device_count(),
      "there is no device virtual:", static_cast<int>(index), ": ",
      static_cast<int>(device_count()), " virtual devices are enabled");
  return index;
}

bool strict() noexcept {
  return strict_flag.load(std::memory_order_relaxed);
}

void set_strict_flag(bool value) noexcept {
  strict_flag.store(value);
}

bool in_forked_child() noexcept {
  return forked.load(std::memory_order_relaxed);
}

void check_not_forked() {
  TORCH_CHECK(
      !in_forked_child(),
      "virtual devices cannot be used in a forked subprocess: "
      "start the subprocess with the 'spawn' start method");
}

void watch_for_fork() {
  pthread_atfork(nullptr, nullptr, [] { forked.store(true); });
}

Counters& counters(c10::DeviceIndex index) noexcept {
  return all_counters[static_cast<size_t>(index)];
}

std::atomic<int64_t>& route(c10::DeviceIndex source, c10::DeviceIndex destination) noexcept {
  return all_routes[static_cast<size_t>(source)][static_cast<size_t>(destination)];
}

}  // namespace vdev
