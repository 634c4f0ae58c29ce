// Kernels for memory and geometry: they run at submission, because they read no contents.
#include "alias.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace vdev {
namespace {

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return checked_index(device.has_value() ? device->index() : c10::DeviceIndex{-1});
}

void check_factory_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(
      c10::layout_or_default(layout) == c10::kStrided, "the 'virtual' device has no layout ",
      c10::layout_or_default(layout));
  TORCH_CHECK(
      !c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  check_factory_options(layout, pin_memory);
  at::detail::check_size_nonnegative(sizes);
  return empty_strided_on(
      index_of(device), sizes, strides, c10::scalarTypeToTypeMeta(c10::dtype_or_default(dtype)));
}

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> format) {
  check_factory_options(layout, pin_memory);
  const c10::DeviceGuard guard(device_at(index_of(device)));
  return at::detail::empty_generic(
      sizes, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor efficientzerotensor(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  check_factory_options(layout, pin_memory);
  at::native::ZeroTensorAllocator no_memory(device_at(index_of(device)));
  const c10::DispatchKeySet keys({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor});
  return at::detail::empty_generic(
      sizes, &no_memory, keys, c10::dtype_or_default(dtype), std::nullopt);
}

const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(
      !format.has_value() || *format != c10::MemoryFormat::Preserve,
      "Unsupported memory format ", *format);
  if (self.sizes() != sizes) {
    c10::SmallVector<int64_t, 5> strides(sizes.size());
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      strides[i] = stride;
      stride *= std::max<int64_t>(sizes[i], 1);
    }
    set_geometry(self, sizes, strides);
  }
  if (format.has_value()) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage_(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  TORCH_CHECK(
      source.device() == self.device(), "Attempted to set the storage of a tensor on device \"",
      self.device(), "\" to a storage on different device \"", source.device(), "\"");
  TORCH_CHECK(offset >= 0, "the storage offset must not be negative, got ", offset);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  c10::SmallVector<int64_t, 5> contiguous(sizes.size());
  if (strides.data() == nullptr || (strides.empty() && !sizes.empty())) {
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      contiguous[i] = stride;
      stride *= std::max<int64_t>(sizes[i], 1);
    }
    strides = contiguous;
  }
  set_geometry(self, sizes, strides);
  return self;
}

// The fallback would not do: there, self would come to own the memory of an alias of the source.
at::Tensor& set_tensor_(at::Tensor& self, const at::Tensor& source) {
  return set_storage_(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_(at::Tensor& self) {
  c10::Storage none(
      c10::Storage::use_byte_size_t(), 0, allocate_on(self.device().index(), 0), &allocator(),
      /*resizable=*/true);
  return set_storage_(self, std::move(none), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (auto block = block_of(self.storage().data_ptr())) {
    block->record(stream_of(stream));
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficientzerotensor);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(
                                    &at::native::set_));
  m.impl("set_.source_Tensor", &set_tensor_);
  m.impl("set_", &set_);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("record_stream", &record_stream);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
}

}  // namespace
}  // namespace vdev
