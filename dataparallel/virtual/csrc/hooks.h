// What is made once per process, and the random generators of the devices.
#pragma once

#include "devices.h"

#include <ATen/core/Generator.h>

namespace vdev {

// Answers torch's questions about the accelerator.
void register_hooks();

// Registers the fallback for operators that would otherwise be decomposed into other ones.
void register_cpu_kernels();

// One generator per device, drawing as the CPU's generator does.
at::Generator make_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);

// The CPU generator behind a device's generator: what CPU kernels can draw from.
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace vdev
