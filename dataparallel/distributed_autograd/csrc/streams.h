// The stream that work of this thread is queued on.
#pragma once

#include <optional>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace dataparallel {

// None on the CPU, which has no streams.
inline std::optional<c10::Stream> current_stream(const c10::Device& device) {
  if (device.is_cpu()) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

} // namespace dataparallel
