// Copies between host and devices, with the ordering between streams that a GPU gives them.
#include "deferred.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/TensorBody.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace vdev {
namespace {

void note_copy(Stream& stream, const at::Tensor& from, const at::Tensor& to) {
  if (checks_races()) {
    Launch launch(stream, "aten::copy_");
    launch.copies(from, false);
    launch.copies(to, true);
    launch.check();
  }
}

void copy_now(const at::Tensor& from, const at::Tensor& to) {
  KernelScope scope;
  const at::Tensor source = is_virtual(from) ? cpu_alias(from) : from;
  at::Tensor target = is_virtual(to) ? cpu_alias(to) : to;
  target.copy_(source);
}

void submit_copy(Stream& stream, const at::Tensor& from, const at::Tensor& to) {
  note_copy(stream, from, to);
  if (is_noted()) {
    add_copy_note(stream, from, to);
  }
  if (!stream.defers()) {
    copy_now(from, to);
    return;
  }
  stream.submit(std::make_unique<CopyTask>("aten::copy_", from, to));
}

void copy_host_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::DeviceIndex device = to.device().index();
  count(device, kCopiesHostToDevice);
  count(device, kBytesHostToDevice, static_cast<int64_t>(from.nbytes()));
  Stream& stream = current_stream(device);
  // Pageable memory is staged: it may be overwritten as soon as the call returns.
  const bool read_late = !stream.defers() || is_pinned(from.storage().data());
  submit_copy(stream, read_late || is_dry() ? from : from.clone(), to);
  if (!non_blocking) {
    count(device, kHostWaits);
    host_waits_for(stream);
  }
}

void copy_device_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::DeviceIndex device = from.device().index();
  count(device, kCopiesDeviceToHost);
  count(device, kBytesDeviceToHost, static_cast<int64_t>(from.nbytes()));
  Stream& stream = current_stream(device);
  submit_copy(stream, from, to);
  if (is_dry()) {
    KernelScope scope;
    at::Tensor target = to;
    target.zero_();
  }
  if (!non_blocking) {
    count(device, kHostWaits);
    host_waits_for(stream);
  }
}

void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  const c10::DeviceIndex device = from.device().index();
  Stream& stream = current_stream(device);
  if (to.device() == from.device()) {
    count(device, kKernels);
    submit_copy(stream, from, to);
    return;
  }
  count(device, kCopiesDeviceToDevice);
  const auto bytes = static_cast<int64_t>(from.nbytes());
  count(device, kBytesDeviceToDevice, bytes);
  route(device, to.device().index()).fetch_add(bytes, std::memory_order_relaxed);
  // The copy belongs to the source's stream. It must follow what the target's stream still does
  // with the memory, and later work on the target's stream must follow the copy.
  Stream& other = current_stream(to.device().index());
  stream.wait(other.record(/*timed=*/false));
  submit_copy(stream, from, to);
  other.wait(stream.record(/*timed=*/false));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  check_not_forked();
  TORCH_CHECK(
      self.layout() == c10::kStrided && dst.layout() == c10::kStrided, "cannot copy from ",
      self.layout(), " on ", self.device(), " to ", dst.layout(), " on ", dst.device());
  TORCH_CHECK(
      at::is_expandable_to(self.sizes(), dst.sizes()), "The size of the source tensor ",
      self.sizes(), " cannot be broadcast to the size of the target tensor ", dst.sizes());
  if (self._is_zerotensor()) {
    at::Tensor target = dst;
    target.zero_();
    return dst;
  }
  if (is_virtual(self) && is_virtual(dst)) {
    copy_between_devices(self, dst);
  } else if (is_virtual(dst)) {
    TORCH_CHECK(self.is_cpu(), "cannot copy from ", self.device(), " to ", dst.device());
    copy_host_to_device(self, dst, non_blocking);
  } else {
    TORCH_CHECK(dst.is_cpu(), "cannot copy from ", self.device(), " to ", dst.device());
    copy_device_to_host(self, dst, non_blocking);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, /*non_blocking=*/false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  count(self.device().index(), kHostWaits);
  Stream& stream = current_stream(self.device().index());
  if (checks_races()) {
    Launch launch(stream, "aten::item");
    launch.use(self, false);
    launch.check();
  }
  host_waits_for(stream);
  KernelScope scope;
  const at::Tensor value = cpu_alias(self);
  return (is_dry() ? at::zeros_like(value) : value).item();
}

// Copies handle conjugate and negative views themselves, since torch resolves those with a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}

}  // namespace
}  // namespace vdev
