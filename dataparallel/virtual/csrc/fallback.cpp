#include "fallback.h"

#include "hooks.h"

#include <ATen/core/TensorBody.h>

namespace vdev {
namespace {

// Return a copy: a number from the host counts as it was at submission.
at::Tensor host_snapshot(const at::Tensor& tensor) {
  at::Tensor copy = tensor.clone();
  // Numbers from Python have their own rules of type promotion.
  copy.unsafeGetTensorImpl()->set_wrapped_number(
      tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

}  // namespace

OperatorCall::OperatorCall(const c10::OperatorHandle& op, torch::jit::Stack& stack, Layouts layouts)
    : op_(op),
      info_(info_of(op)),
      stack_(stack),
      base_(stack.size() - static_cast<size_t>(info_.num_arguments)),
      layouts_(layouts) {}

void OperatorCall::run() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      info_.has_cpu_kernel || layouts_ == Layouts::kAny, info_.name, " is not implemented for the 'virtual' device");
  check_not_forked();
  inspect();
  if (info_.is_view) {
    run_now();
    return;
  }
  count(device_, kKernels);
  Stream& stream = current_stream(device_);
  if (C10_UNLIKELY(is_noted())) {
    launch_noted(stream);
  } else {
    launch(stream);
  }
}

void OperatorCall::launch(Stream& stream) {
  if (checks_races()) {
    run_checked(stream);
  } else {
    run_on(stream);
  }
}

void OperatorCall::launch_noted(Stream& stream) {
  KernelNote note(
      info_,
      at::ArrayRef<c10::IValue>(stack_.data() + base_, static_cast<size_t>(info_.num_arguments)));
  launch(stream);
  note.add(stream, at::ArrayRef<c10::IValue>(stack_.data() + base_, info_.returns.size()));
}

void OperatorCall::run_on(Stream& stream) {
  if (stream.defers()) {
    run_deferred(stream);
  } else {
    run_now();
  }
}

void OperatorCall::run_checked(Stream& stream) {
  Launch launch(stream, info_.name.c_str());
  for (const auto& each : info_.tensors) {
    if (each.writes || !info_.reads_nothing) {
      const bool writes =
          each.writes && (each.written_if < 0 || argument(each.written_if).toBool());
      visit_tensors(argument(each.index), [&](const at::Tensor& tensor) {
        launch.use(tensor, writes, info_.is_partial);
      });
    }
  }
  launch.check();
  run_on(stream);
  for (auto value = stack_.end() - static_cast<std::ptrdiff_t>(info_.returns.size());
       value != stack_.end(); ++value) {
    visit_tensors(*value, [&](const at::Tensor& tensor) { launch.made(tensor); });
  }
  if (info_.host_waits && !stream.capturing()) {
    host_waits_for(stream);
  }
}

// Find the device, and complain about arguments that are not on it.
void OperatorCall::inspect() {
  for (const auto& tensor_argument : info_.tensors) {
    visit_tensors(argument(tensor_argument.index), [&](const at::Tensor& tensor) {
      inspect_tensor(tensor, tensor_argument);
    });
  }
  if (found_) {
    if (host_argument_ != nullptr) {
      fail_on_mixed_devices(c10::Device(c10::kCPU), *host_argument_);
    }
    return;
  }
  // Only the generator can have brought the call here.
  TORCH_CHECK(
      !found_host_ || info_.generator_argument < 0,
      "Expected a 'cpu' device type for generator but found 'virtual'");
  device_ = current_device();
  for (int index : info_.device_arguments) {
    if (argument(index).isDevice()) {
      device_ = checked_index(argument(index).toDevice().index());
    }
  }
}

void OperatorCall::inspect_tensor(const at::Tensor& tensor, const TensorArgument& argument) {
  const c10::Device device = tensor.device();
  if (device.type() == c10::DeviceType::PrivateUse1) {
    foreign_memory_ |= !is_ours(tensor);
    if (!found_) {
      found_ = true;
      device_ = device.index();
    } else if (device.index() != device_) {
      fail_on_mixed_devices(device, argument);
    }
  } else {
    found_host_ = true;
    if (!argument.may_be_on_host && tensor.dim() > 0 && host_argument_ == nullptr) {
      host_argument_ = &argument;
    }
  }
}

void OperatorCall::fail_on_mixed_devices(
    const c10::Device& other, const TensorArgument& argument) const {
  TORCH_CHECK(
      false, "Expected all tensors to be on the same device, but found at least two devices, ",
      device_at(device_), " and ", other, "! (when checking argument '",
      info_.schema->arguments()[static_cast<size_t>(argument.index)].name(), "' of ", info_.name,
      ")");
}

void OperatorCall::run_now() {
  bind_cpu_arguments(/*snapshot_host_tensors=*/false);
  {
    KernelScope scope;
    if (layouts_ == Layouts::kAny) {
      op_.callBoxed(&stack_);
    } else {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
  }
  take_results();
}

void OperatorCall::bind_cpu_arguments(bool snapshot) {
  originals_.assign(stack_.begin() + static_cast<std::ptrdiff_t>(base_), stack_.end());
  operands_.clear();
  for (const auto& tensor_argument : info_.tensors) {
    change_tensors(argument(tensor_argument.index), [&](const at::Tensor& tensor) {
      return bind_tensor(tensor, tensor_argument.writes, snapshot);
    });
  }
  for (int index : info_.device_arguments) {
    if (argument(index).isDevice()) {
      argument(index) = c10::Device(c10::kCPU);
    }
  }
  if (info_.generator_argument >= 0) {
    c10::IValue& given = argument(info_.generator_argument);
    if (!given.isNone()) {
      TORCH_CHECK(
          given.toGenerator().device() == device_at(device_), "Expected a '", device_at(device_),
          "' generator but found one for '", given.toGenerator().device(), "'");
    }
    given = cpu_generator_of(given.isNone() ? default_generator(device_) : given.toGenerator());
  }
}

at::Tensor OperatorCall::bind_tensor(const at::Tensor& tensor, bool writes, bool snapshot) {
  if (!is_virtual(tensor)) {
    return snapshot ? host_snapshot(tensor) : tensor;
  }
  if (C10_UNLIKELY(tensor.is_sparse())) {
    return sparse_cpu_alias(tensor, writes, operands_);
  }
  at::Tensor alias = cpu_alias(tensor);
  operands_.push_back({tensor, alias, alias.storage().data(), writes});
  return alias;
}

void OperatorCall::take_results() {
  const size_t num_returns = info_.returns.size();
  const size_t first = stack_.size() - num_returns;
  for (size_t i = 0; i < num_returns; ++i) {
    stack_[first + i] = result_for(info_.returns[i], std::move(stack_[first + i]));
  }
  if (!info_.has_writes) {
    return;
  }
  const auto written = operands_;  // Wrapping adds to the list.
  for (const auto& operand : written) {
    if (!operand.writes) {
      continue;
    }
    if (operand.original.is_sparse()) {
      match_sparse(operand.original, operand.alias, [this](const at::Tensor& part) {
        return wrap(part);
      });
    } else {
      match_resized(operand.original, operand.alias, operand.data);
    }
  }
}

c10::IValue OperatorCall::result_for(const ReturnValue& info, c10::IValue value) {
  if (info.written_argument >= 0) {
    return originals_[static_cast<size_t>(info.written_argument)];
  }
  if (info.kind == ReturnKind::kTensor) {
    // Moved out of the value, so that the memory has one owner and can be taken over.
    const at::Tensor result = std::move(value).toTensor();
    return wrap(result);
  }
  if (info.kind == ReturnKind::kTensorList) {
    std::vector<at::Tensor> wrapped;
    for (const at::Tensor& result : value.toTensorVector()) {
      wrapped.push_back(wrap(result));
    }
    return wrapped;
  }
  return value;
}

at::Tensor OperatorCall::wrap(const at::Tensor& result) {
  if (!result.defined() || is_virtual(result)) {
    return result;
  }
  if (C10_UNLIKELY(result.is_sparse())) {
    return adopt_sparse(
        result, [this](const at::Tensor& part) { return wrap(part); }, device_);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      result.has_storage(), info_.name, " gives a tensor with layout ", result.layout(),
      ", which the 'virtual' device does not have");
  const void* data = result.storage().data();
  for (const auto& operand : operands_) {
    if (operand.alias.is_same(result)) {
      return operand.original;
    }
    if (data != nullptr && operand.data == data) {
      return view_on(operand.original.storage(), result);
    }
  }
  at::Tensor adopted = adopt(result, device_);
  if (info_.returns.size() > 1 && data != nullptr) {
    // Another result may be a view of the same memory.
    operands_.push_back({adopted, result, data, false});
  }
  return adopted;
}

void cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  OperatorCall(op, *stack).run();
}

void any_layout_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  OperatorCall(op, *stack, OperatorCall::Layouts::kAny).run();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&cpu_kernel_fallback>());
}

}  // namespace vdev
