#include "alias.h"

#include <c10/core/CPUAllocator.h>

#include <ATen/EmptyTensor.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/core/TensorBody.h>

namespace vdev {
namespace {

const c10::DispatchKeySet kCallerConcerns =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

const c10::DispatchKeySet kModes({
    c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
    c10::DispatchKey::PreDispatch, c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
    c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::Functionalize});

thread_local int running_kernels = 0;

// Sizes and strides of a nested tensor are kept on the host, for every device.
at::Tensor nested_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  const auto* impl = at::native::get_nested_tensor_impl(like);
  const c10::DispatchKeySet keys(
      key == c10::DispatchKey::CPU ? c10::DispatchKey::NestedTensorCPU
                                   : c10::DispatchKey::NestedTensorPrivateUse1);
  return at::detail::make_tensor<at::native::NestedTensorImpl>(
      std::move(storage), keys, like.dtype(), impl->get_nested_sizes(), impl->get_nested_strides(),
      impl->get_storage_offsets());
}

at::Tensor with_geometry(
    c10::Storage storage, c10::DispatchKey key, const at::Tensor& like, bool view) {
  if (C10_UNLIKELY(like.is_nested())) {
    return nested_on(std::move(storage), key, like);
  }
  const c10::DispatchKeySet keys(key);
  at::Tensor made = view
      ? at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, std::move(storage), keys, like.dtype())
      : at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (C10_UNLIKELY(like.is_conj())) {
    made._set_conj(true);
  }
  if (C10_UNLIKELY(like.is_neg())) {
    made._set_neg(true);
  }
  if (C10_UNLIKELY(like.unsafeGetTensorImpl()->is_wrapped_number())) {
    impl->set_wrapped_number(true);
  }
  return made;
}

}  // namespace

KernelScope::KernelScope() : guard_(kCallerConcerns) {
  ++running_kernels;
}

KernelScope::~KernelScope() {
  --running_kernels;
}

bool KernelScope::is_inside() noexcept {
  return running_kernels > 0;
}

DeferredScope::DeferredScope()
    : guard_(
          c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
          c10::default_excluded_set | kCallerConcerns | kModes) {}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  c10::Storage alias(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      host_view(storage.data_ptr()), c10::GetCPUAllocator(), /*resizable=*/true);
  return with_geometry(std::move(alias), c10::DispatchKey::CPU, tensor, false);
}

at::Tensor meta_alias(const at::Tensor& tensor) {
  const size_t nbytes = tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes();
  c10::Storage alias(
      c10::Storage::use_byte_size_t(), nbytes,
      c10::DataPtr(nullptr, c10::Device(c10::kMeta)), c10::GetAllocator(c10::kMeta),
      /*resizable=*/true);
  return with_geometry(std::move(alias), c10::DispatchKey::Meta, tensor, false);
}

at::Tensor view_on(const at::Storage& storage, const at::Tensor& cpu) {
  return with_geometry(storage, c10::DispatchKey::PrivateUse1, cpu, true);
}

at::Tensor adopt(const at::Tensor& cpu, c10::DeviceIndex device) {
  c10::StorageImpl* host = cpu.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const size_t nbytes = host->nbytes();
  c10::DataPtr memory;
  if (cpu.use_count() == 1 && cpu.storage().use_count() == 1) {
    memory = host->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
  } else {
    // Somebody else holds the storage, so the block keeps it rather than emptying it.
    auto* kept = new c10::Storage(cpu.storage());
    memory = c10::DataPtr(
        host->mutable_data(), kept, [](void* held) { delete static_cast<c10::Storage*>(held); },
        c10::Device(c10::kCPU));
  }
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), nbytes, adopt_memory(std::move(memory), nbytes, device),
      &allocator(), /*resizable=*/true);
  return with_geometry(std::move(storage), c10::DispatchKey::PrivateUse1, cpu, false);
}

at::Tensor empty_strided_on(
    c10::DeviceIndex device, at::IntArrayRef sizes, at::IntArrayRef strides,
    caffe2::TypeMeta type) {
  const size_t nbytes = at::detail::computeStorageNbytes(sizes, strides, type.itemsize());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), nbytes, allocate_on(device, nbytes), &allocator(),
      /*resizable=*/true);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

void match_resized(const at::Tensor& tensor, const at::Tensor& alias, const void* data) {
  c10::StorageImpl* host = alias.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (host->data() != data || host->nbytes() != tensor.storage().nbytes()) {
    const size_t nbytes = host->nbytes();
    auto memory = host->set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
    tensor.storage().set_data_ptr_noswap(
        adopt_memory(std::move(memory), nbytes, tensor.device().index()));
    tensor.storage().set_nbytes(nbytes);
  }
  if (C10_UNLIKELY(alias.is_nested())) {
    return;
  }
  if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        alias.sizes(), alias.strides(), alias.storage_offset());
  }
}

void set_geometry(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const size_t needed = at::detail::computeStorageNbytes(
      sizes, strides, tensor.dtype().itemsize(), static_cast<size_t>(tensor.storage_offset()));
  if (needed > tensor.storage().nbytes()) {
    TORCH_CHECK(tensor.storage().resizable(), "Trying to resize storage that is not resizable");
    resize_storage(tensor.storage(), needed);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

}  // namespace vdev
