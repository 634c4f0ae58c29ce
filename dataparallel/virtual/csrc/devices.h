// Which virtual devices exist, what each thread has made current, and what was counted.
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

// The current device of this thread, as torch.virtual.current_device() tells it.
c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex index) noexcept;

// Throws for an index that no enabled device has; -1 means the current device.
c10::DeviceIndex checked_index(c10::DeviceIndex index);

inline c10::Device device_at(c10::DeviceIndex index) {
  return c10::Device(c10::DeviceType::PrivateUse1, index);
}

// In strict mode default streams defer like any other.
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

// One cache line or more for each device: threads driving different devices never share one.
struct alignas(64) Counters {
  std::array<std::atomic<int64_t>, kNumCounters> values{};
};

Counters& counters(c10::DeviceIndex index) noexcept;

// Bytes copied from one device to another.
std::atomic<int64_t>& route(c10::DeviceIndex source, c10::DeviceIndex destination) noexcept;

inline void count(c10::DeviceIndex index, Counter which, int64_t amount = 1) noexcept {
  counters(index).values[which].fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace vdev
