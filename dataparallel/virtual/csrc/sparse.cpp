// Sparse COO tensors: each is a pair of dense tensors on the device.
#include "fallback.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>

namespace vdev {
namespace {

at::SparseTensorImpl* impl_of(const at::Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::Tensor sparse_like(
    c10::DispatchKey key, const at::Tensor& like, const at::Tensor& indices,
    const at::Tensor& values) {
  at::Tensor made = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(key), like.dtype());
  impl_of(made)->resize_(like.sparse_dim(), like.dense_dim(), like.sizes());
  impl_of(made)->set_indices_and_values_unsafe(indices, values);
  impl_of(made)->set_coalesced(like.is_coalesced());
  return made;
}

at::Tensor empty_sparse_coo(
    int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype, std::optional<c10::Device> device) {
  const c10::DeviceGuard guard(device_at(
      checked_index(device.has_value() ? device->index() : c10::DeviceIndex{-1})));
  at::Tensor made = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1),
      c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)));
  impl_of(made)->resize_and_clear_(sparse_dim, dense_dim, sizes);
  return made;
}

at::Tensor with_dims(
    int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype, std::optional<c10::Layout> /*layout*/,
    std::optional<c10::Device> device, std::optional<bool> /*pin_memory*/) {
  return empty_sparse_coo(sparse_dim, dense_dim, sizes, dtype, device);
}

at::Tensor with_dims_and_tensors(
    int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef sizes, const at::Tensor& indices,
    const at::Tensor& values, std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> /*layout*/, std::optional<c10::Device> /*device*/,
    std::optional<bool> /*pin_memory*/, std::optional<bool> is_coalesced) {
  TORCH_CHECK(
      indices.device() == values.device(), "device of indices (", indices.device(),
      ") must match device of values (", values.device(), ")");
  at::Tensor made = empty_sparse_coo(
      sparse_dim, dense_dim, sizes,
      dtype.value_or(c10::typeMetaToScalarType(values.dtype())), values.device());
  // They become views: the caller's tensors keep their autograd history to themselves.
  impl_of(made)->set_indices_and_values_unsafe(
      view_on(indices.storage(), indices), view_on(values.storage(), values));
  impl_of(made)->set_coalesced(is_coalesced.value_or(values.size(0) < 2));
  return made;
}

at::Tensor empty_coo_from_factory(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> /*layout*/, std::optional<c10::Device> device,
    std::optional<bool> /*pin_memory*/, std::optional<c10::MemoryFormat> /*format*/) {
  return empty_sparse_coo(static_cast<int64_t>(sizes.size()), 0, sizes, dtype, device);
}

// Torch makes the parts of these tensors on the current device, so that must be the tensor's own.

at::Tensor clone(const at::Tensor& self, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::clone_sparse(self, format);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const c10::DeviceGuard guard(is_virtual(self) ? self.device() : source.device());
  return at::native::copy_sparse_wrapper_(self, source, non_blocking);
}

at::Tensor& copy_sparse_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const c10::DeviceGuard guard(is_virtual(self) ? self.device() : source.device());
  return at::native::copy_sparse_(self, source, non_blocking);
}

at::Tensor empty_like(
    const at::Tensor& self, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(self.device()));
  return at::native::empty_like_sparse_coo(self, dtype, layout, device, pin_memory, format);
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_layout_fallback>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("empty.memory_format", &empty_coo_from_factory);
  m.impl("_sparse_coo_tensor_with_dims", &with_dims);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", &with_dims_and_tensors);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("_dimI", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("_dimV", &at::native::dense_dim_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("copy_sparse_to_sparse_", &copy_sparse_);
  m.impl("copy_", &copy_);
  m.impl("clone", &clone);
  m.impl("empty_like", &empty_like);
}

}  // namespace

at::Tensor sparse_cpu_alias(
    const at::Tensor& tensor, bool writes, c10::SmallVector<Operand, 6>& operands) {
  at::Tensor parts[2] = {tensor._indices(), tensor._values()};
  at::Tensor aliases[2];
  for (int i = 0; i < 2; ++i) {
    aliases[i] = cpu_alias(parts[i]);
    operands.push_back({parts[i], aliases[i], aliases[i].storage().data(), false});
  }
  at::Tensor alias =
      sparse_like(c10::DispatchKey::SparseCPU, tensor, aliases[0], aliases[1]);
  operands.push_back({tensor, alias, nullptr, writes});
  return alias;
}

at::Tensor adopt_sparse(
    const at::Tensor& cpu, const std::function<at::Tensor(const at::Tensor&)>& wrap,
    c10::DeviceIndex device) {
  const c10::DeviceGuard guard(device_at(device));
  return sparse_like(
      c10::DispatchKey::SparsePrivateUse1, cpu, wrap(cpu._indices()), wrap(cpu._values()));
}

void match_sparse(
    const at::Tensor& tensor, const at::Tensor& alias,
    const std::function<at::Tensor(const at::Tensor&)>& wrap) {
  const c10::DeviceGuard guard(tensor.device());
  at::Tensor indices = wrap(alias._indices());
  at::Tensor values = wrap(alias._values());
  impl_of(tensor)->raw_resize_(alias.sparse_dim(), alias.dense_dim(), alias.sizes());
  impl_of(tensor)->set_indices_and_values_unsafe(indices, values);
  impl_of(tensor)->set_coalesced(alias.is_coalesced());
}

}  // namespace vdev
