#include "tasks.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>

namespace vdev {

at::Tensor for_task(const at::Tensor& tensor) {
  return is_virtual(tensor) ? cpu_alias(tensor) : tensor.alias();
}

void CopyTask::run() {
  at::NoGradGuard no_grad;
  DeferredScope scope;
  to_.copy_(from_);
}

at::Tensor OperatorTask::expect_tensor(
    const TensorDescription& described, c10::DeviceIndex device) {
  if (!described.defined) {
    targets_.back().emplace_back();
    return {};
  }
  at::Tensor made = empty_strided_on(device, described.sizes, described.strides, described.type);
  targets_.back().push_back(cpu_alias(made));
  return made;
}

c10::IValue OperatorTask::expect(
    const std::vector<TensorDescription>& described, ReturnKind kind, c10::DeviceIndex device) {
  targets_.emplace_back();
  if (kind == ReturnKind::kTensor) {
    return expect_tensor(described[0], device);
  }
  std::vector<at::Tensor> made;
  for (const TensorDescription& one : described) {
    made.push_back(expect_tensor(one, device));
  }
  return made;
}

void OperatorTask::expect_nothing() {
  targets_.emplace_back();
}

void OperatorTask::run() {
  at::NoGradGuard no_grad;
  DeferredScope scope;
  std::vector<const void*> places;
  for (const auto& tensor : written) {
    places.push_back(tensor.storage().data());
  }
  std::vector<c10::IValue> stack = std::move(arguments);
  op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  for (size_t i = 0; i < written.size(); ++i) {
    TORCH_CHECK(
        written[i].storage().data() == places[i], name_,
        " resized an argument, which its meta kernel did not foresee");
  }
  for (size_t i = 0; i < targets_.size(); ++i) {
    store(stack[i], targets_[i]);
  }
}

void OperatorTask::store(const c10::IValue& result, const std::vector<at::Tensor>& targets) const {
  if (targets.empty()) {
    return;
  }
  if (result.isTensor()) {
    store_tensor(result.toTensor(), targets[0]);
    return;
  }
  const auto results = result.toTensorVector();
  TORCH_CHECK(
      results.size() == targets.size(), name_, " gave ", results.size(), " tensors, but ",
      targets.size(), " were expected");
  for (size_t i = 0; i < results.size(); ++i) {
    store_tensor(results[i], targets[i]);
  }
}

void OperatorTask::store_tensor(const at::Tensor& result, const at::Tensor& target) const {
  // Where a CPU kernel leaves an output empty, nothing reads it: the saved statistics of batch_norm
  // in evaluation, for instance.
  if (!target.defined() || !result.defined() || result.numel() == 0) {
    return;
  }
  TORCH_CHECK(
      result.sizes() == target.sizes() && result.dtype() == target.dtype(), name_, " gave ",
      result.dtype(), result.sizes(), " where its meta kernel promised ", target.dtype(),
      target.sizes());
  target.copy_(result);
}

}  // namespace vdev
