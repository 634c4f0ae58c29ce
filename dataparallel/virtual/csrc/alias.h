// The same memory seen by two devices: CPU tensors over device memory, and back.
#pragma once

#include "memory.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace vdev {

inline bool is_virtual(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// False for memory that was made elsewhere: its lifetime cannot be followed, so nothing is queued.
inline bool is_ours(const at::Tensor& tensor) {
  return tensor.is_sparse() || tensor.storage().nbytes() == 0 ||
      block_of(tensor.storage().data_ptr());
}

// Keeps the memory in existence, not the device's tensor.
at::Tensor cpu_alias(const at::Tensor& tensor);
at::Tensor meta_alias(const at::Tensor& tensor);

// A device tensor that takes over the memory of a CPU tensor.
at::Tensor adopt(const at::Tensor& cpu, c10::DeviceIndex device);
// A device tensor with the geometry of `cpu` on storage that is already on the device.
at::Tensor view_on(const at::Storage& storage, const at::Tensor& cpu);
at::Tensor empty_strided_on(
    c10::DeviceIndex device, at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta type);

// After a CPU kernel wrote to `alias`: a kernel that resized it did so for `tensor`.
void match_resized(const at::Tensor& tensor, const at::Tensor& alias, const void* data);

// Makes room in the storage of `tensor` for this geometry, and sets it.
void set_geometry(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

// Kernels see plain tensors: neither the caller's autograd nor its autocast concerns them.
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

// The same for work that runs later, amid whatever modes the waiting thread is in.
class DeferredScope {
 public:
  DeferredScope();

 private:
  KernelScope kernel_;
  c10::impl::ForceDispatchKeyGuard guard_;
};

}  // namespace vdev
