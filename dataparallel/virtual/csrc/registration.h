#pragma once

namespace vdev {

// Registers the fallback for operators that would otherwise be decomposed into other ones.
void register_cpu_kernels();

}  // namespace vdev
