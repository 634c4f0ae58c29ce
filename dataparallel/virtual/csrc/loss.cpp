#include "loss.h"

#include "devices.h"
#include "streams.h"

#include <c10/util/Exception.h>

#include <limits>

namespace vdev {
namespace {

constexpr int64_t kForever = std::numeric_limits<int64_t>::max();
// What CUDA calls cudaErrorDevicesUnavailable.
constexpr int32_t kErrorCode = 46;

struct alignas(64) Health {
  std::atomic<int64_t> operations_left{kForever};
  std::atomic<uint32_t> restorations{0};
};
std::array<Health, kMaxDevices> all_health;

Health& health(c10::DeviceIndex device) noexcept {
  return all_health[static_cast<size_t>(device)];
}

[[noreturn]] void fail(const std::string& message) {
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kErrorCode, message);
}

}  // namespace

void lose_device(c10::DeviceIndex device, int64_t after) {
  device = checked_index(device);
  health(device).operations_left.store(after);
  if (after <= 0) {
    drop_work_on(device);
  }
}

void restore_device(c10::DeviceIndex device) {
  device = checked_index(device);
  if (is_lost(device)) {
    // Before anything can be queued again, which would be dropped with it.
    drop_work_on(device);
    health(device).restorations.fetch_add(1);
  }
  health(device).operations_left.store(kForever);
}

bool is_lost(c10::DeviceIndex device) noexcept {
  return health(device).operations_left.load(std::memory_order_relaxed) <= 0;
}

uint32_t restorations(c10::DeviceIndex device) noexcept {
  return health(device).restorations.load(std::memory_order_relaxed);
}

void fail_on_lost_device(c10::DeviceIndex device) {
  fail(c10::str(
      "virtual error: the device virtual:", static_cast<int>(device),
      " is lost. Nothing works on it before dataparallel.virtual.restore_device"));
}

void fail_on_lost_memory(c10::DeviceIndex device) {
  fail(c10::str(
      "virtual error: the device virtual:", static_cast<int>(device),
      " was lost, and with it the contents of tensors that were made before. Make new ones"));
}

void begin_operation(c10::DeviceIndex device) {
  auto& left = health(device).operations_left;
  if (C10_LIKELY(left.load(std::memory_order_relaxed) == kForever)) {
    return;
  }
  if (left.fetch_sub(1) <= 0) {
    fail_on_lost_device(device);
  }
}

}  // namespace vdev
