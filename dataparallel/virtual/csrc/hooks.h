#pragma once

namespace vdev {

// Answers torch's questions about the accelerator. Once per process.
void register_hooks();

}  // namespace vdev
