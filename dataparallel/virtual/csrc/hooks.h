// The registrations that a process makes once, and the random generators of the devices.
#pragma once

#include "devices.h"

#include <ATen/core/Generator.h>

namespace vdev {

// Register the answers to torch's questions about the accelerator.
void register_hooks();

// Register the fallback for operators that would otherwise be decomposed into other ones.
void register_cpu_kernels();

// Make the generator of a device, which draws as the CPU's generator does.
at::Generator make_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);

// Return the CPU generator behind a device's generator, from which CPU kernels can draw.
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace vdev
