// Devices that are lost, as a GPU is that has fallen off the bus: nothing works on them any more.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace vdev {

// After so many further operations and copies on a device, all that follow on it fail.
void lose_device(c10::DeviceIndex device, int64_t after);
// The device works again; what was in its memory is gone for good.
void restore_device(c10::DeviceIndex device);
bool is_lost(c10::DeviceIndex device) noexcept;

// How often the device was restored: memory that was allocated before the last time is gone.
uint32_t restorations(c10::DeviceIndex device) noexcept;

[[noreturn]] void fail_on_lost_device(c10::DeviceIndex device);
[[noreturn]] void fail_on_lost_memory(c10::DeviceIndex device);

inline void check_alive(c10::DeviceIndex device) {
  if (is_lost(device)) {
    fail_on_lost_device(device);
  }
}

// Counts an operation or a copy, and throws if the device is lost.
void begin_operation(c10::DeviceIndex device);

}  // namespace vdev
