// The same memory as tensors of two devices: CPU tensors over device memory, and back.
#pragma once

#include "memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace vdev {

inline bool is_virtual(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// False for memory that was made elsewhere: its lifetime is unknown, so nothing is queued on it.
inline bool is_ours(const at::Tensor& tensor) {
  return tensor.is_sparse() || tensor.storage().nbytes() == 0 ||
      block_of(tensor.storage().data_ptr());
}

// Return a CPU tensor that keeps the memory in existence, but not the device's tensor.
at::Tensor cpu_alias(const at::Tensor& tensor);
at::Tensor meta_alias(const at::Tensor& tensor);

// Return a device tensor that takes over the memory of a CPU tensor.
at::Tensor adopt(const at::Tensor& cpu, c10::DeviceIndex device);
// Return a device tensor with the geometry of `cpu` on storage that is already on the device.
at::Tensor view_on(const at::Storage& storage, const at::Tensor& cpu);
at::Tensor empty_strided_on(
    c10::DeviceIndex device, at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta type);

// Resize `tensor` if a CPU kernel has resized its `alias`.
void match_resized(const at::Tensor& tensor, const at::Tensor& alias, const void* data);

// Make room in the storage of `tensor` for this geometry, and set it.
void set_geometry(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

// The scope of a kernel, which sees plain tensors without the caller's autograd and autocast.
class KernelScope {
 public:
  KernelScope();
  ~KernelScope();
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

  // True if this thread runs a kernel of a device.
  static bool is_inside() noexcept;

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

// The same for work that runs later, under whatever modes the waiting thread has set.
class DeferredScope {
 public:
  DeferredScope();

 private:
  KernelScope kernel_;
  c10::impl::ForceDispatchKeyGuard guard_;
};

}  // namespace vdev
