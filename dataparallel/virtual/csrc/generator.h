// One random generator per device, drawing as the CPU's generator does.
#pragma once

#include "devices.h"

#include <ATen/core/Generator.h>

namespace vdev {

at::Generator make_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);

// The CPU generator behind a device's generator: what CPU kernels can draw from.
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace vdev
