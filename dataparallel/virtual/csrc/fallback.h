// The fallback: it runs any operator on a virtual device through its CPU kernel.
#pragma once

#include "alias.h"
#include "operators.h"

#include <ATen/core/stack.h>
#include <torch/library.h>

namespace vdev {

// A tensor argument, and the tensor that the CPU kernel gets in its place.
struct Operand {
  at::Tensor original;
  at::Tensor alias;
  const void* data;
  bool writes;
};

// One call of an operator. The CPU kernel of `op` runs: it may stand in for the operator that was
// called.
class OperatorCall {
 public:
  enum class Layouts { kDense, kAny };

  OperatorCall(
      const c10::OperatorHandle& op, torch::jit::Stack& stack, Layouts layouts = Layouts::kDense);

  void run();

 private:
  void inspect();
  void launch(Stream& stream);
  // Launch it likewise, and note that in the trace.
  void launch_noted(Stream& stream);
  void run_on(Stream& stream);
  // Run it likewise, and check that no work on other streams races with it.
  void run_checked(Stream& stream);
  void inspect_tensor(const at::Tensor& tensor, const TensorArgument& argument);
  [[noreturn]] void fail_on_mixed_devices(
      const c10::Device& other, const TensorArgument& argument) const;

  void run_now();
  void bind_cpu_arguments(bool snapshot_host_tensors);
  at::Tensor bind_tensor(const at::Tensor& tensor, bool writes, bool snapshot);
  void take_results();
  c10::IValue result_for(const ReturnValue& info, c10::IValue value);
  at::Tensor wrap(const at::Tensor& result);

  void run_deferred(Stream& stream);
  // Queue an operator that is never run, or raise if only running it would tell its results.
  void run_dry(Stream& stream);
  bool can_defer() const;
  void sample_now_write_later(Stream& stream);
  void queue(Stream& stream, const Description* described);

  c10::IValue& argument(int index) {
    return stack_[base_ + static_cast<size_t>(index)];
  }

  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  torch::jit::Stack& stack_;
  size_t base_;
  Layouts layouts_;
  bool found_ = false;
  bool found_host_ = false;
  bool foreign_memory_ = false;
  c10::DeviceIndex device_ = 0;
  const TensorArgument* host_argument_ = nullptr;
  c10::SmallVector<c10::IValue, 8> originals_;
  c10::SmallVector<Operand, 6> operands_;
};

void cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void any_layout_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// These treat sparse tensors as pairs of dense ones.
at::Tensor sparse_cpu_alias(
    const at::Tensor& tensor, bool writes, c10::SmallVector<Operand, 6>& operands);
at::Tensor adopt_sparse(
    const at::Tensor& cpu, const std::function<at::Tensor(const at::Tensor&)>& wrap,
    c10::DeviceIndex device);
void match_sparse(
    const at::Tensor& tensor, const at::Tensor& alias,
    const std::function<at::Tensor(const at::Tensor&)>& wrap);

// Call `visit` with every defined tensor in a value: a tensor, an optional one or a list.
template <typename Visit>
void visit_tensors(const c10::IValue& value, const Visit& visit) {
  const auto visit_one = [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      visit(tensor);
    }
  };
  if (value.isTensor()) {
    visit_one(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      visit_one(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      visit_one(tensor.value_or(at::Tensor()));
    }
  }
}

// Apply `change` to every defined tensor in an argument: a tensor, an optional one or a list.
template <typename Change>
void change_tensors(c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    if (value.unsafeToTensorImpl() != c10::UndefinedTensorImpl::singleton()) {
      value = change(value.toTensor());
    }
  } else if (value.isTensorList()) {
    const auto list = value.toTensorVector();
    c10::List<at::Tensor> changed;
    changed.reserve(list.size());
    for (const auto& tensor : list) {
      changed.push_back(tensor.defined() ? change(tensor) : tensor);
    }
    value = std::move(changed);
  } else if (value.isOptionalTensorList()) {
    const auto list = value.toOptionalTensorVector();
    c10::List<std::optional<at::Tensor>> changed;
    changed.reserve(list.size());
    for (const auto& tensor : list) {
      const bool present = tensor.has_value() && tensor->defined();
      changed.push_back(present ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    }
    value = std::move(changed);
  }
}

}  // namespace vdev
