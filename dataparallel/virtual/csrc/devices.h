// The virtual devices that exist, the current one of each thread, and what is counted of each.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace vdev {

constexpr int kMaxDevices = 64;

c10::DeviceIndex device_count() noexcept;
void set_device_count(int count);

// Return the current device of this thread, as torch.virtual.current_device() does.
c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex index) noexcept;

// Return the index, where -1 means the current device; throw if no enabled device has it.
c10::DeviceIndex checked_index(c10::DeviceIndex index);

inline c10::Device device_at(c10::DeviceIndex index) {
  return c10::Device(c10::DeviceType::PrivateUse1, index);
}

// True if default streams defer like any other.
bool strict() noexcept;
void set_strict_flag(bool value) noexcept;

// True in a child of fork() whose parent had used the devices: locks and queues may be half-way.
bool in_forked_child() noexcept;
void check_not_forked();
void watch_for_fork();

enum Counter : int {
  kKernels,
  kCopiesHostToDevice,
  kBytesHostToDevice,
  kCopiesDeviceToHost,
  kBytesDeviceToHost,
  kCopiesDeviceToDevice,
  kBytesDeviceToDevice,
  kAllocations,
  kAllocatedBytes,
  // The host does not go on before a stream, event or device has done its work.
  kHostWaits,
  kNumCounters,
};

// The counters of a device, on cache lines of their own: different threads drive the devices.
struct alignas(64) Counters {
  std::array<std::atomic<int64_t>, kNumCounters> values{};
};

Counters& counters(c10::DeviceIndex index) noexcept;

// Return the counter of bytes that were copied from one device to another.
std::atomic<int64_t>& route(c10::DeviceIndex source, c10::DeviceIndex destination) noexcept;

inline void count(c10::DeviceIndex index, Counter which, int64_t amount = 1) noexcept {
  counters(index).values[which].fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace vdev
