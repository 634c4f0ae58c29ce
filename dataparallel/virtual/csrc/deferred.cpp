// Operators on a stream that defers: they are queued if they can be, else they wait for the stream.
#include "deferred.h"

#include "fallback.h"

#include <ATen/core/TensorBody.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

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
  // A graph runs the task again.
  std::vector<c10::IValue> stack = arguments;
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
  // If a CPU kernel leaves an output empty, nothing reads it: the saved statistics of batch_norm in
  // evaluation, for instance.
  if (!target.defined() || !result.defined() || result.numel() == 0) {
    return;
  }
  TORCH_CHECK(
      result.sizes() == target.sizes() && result.dtype() == target.dtype(), name_, " gave ",
      result.dtype(), result.sizes(), " where its meta kernel promised ", target.dtype(),
      target.sizes());
  target.copy_(result);
}

// Only metadata is known at submission, so only operators whose metadata suffices can be queued.
bool OperatorCall::can_defer() const {
  return layouts_ == Layouts::kDense && !foreign_memory_ && !info_.runs_at_once;
}

void OperatorCall::run_dry(Stream& stream) {
  const bool has_values = info_.returns_other || layouts_ != Layouts::kDense || foreign_memory_;
  const auto described = has_values
      ? nullptr
      : describe(
            op_, info_,
            at::ArrayRef<c10::IValue>(
                stack_.data() + base_, static_cast<size_t>(info_.num_arguments)));
  const bool in_place = !info_.has_new_outputs && !info_.has_out_arguments;
  TORCH_CHECK_NOT_IMPLEMENTED(
      described || (in_place && !has_values && !info_.has_meta_kernel), info_.name,
      " cannot be queued in dry mode, in which nothing runs: it has no meta kernel that tells its "
      "results from the shapes of its arguments");
  queue(stream, described.get());
}

void OperatorCall::run_deferred(Stream& stream) {
  if (C10_UNLIKELY(is_dry())) {
    run_dry(stream);
    return;
  }
  if (C10_UNLIKELY(holds_too_much(device_)) && !stream.capturing()) {
    stream.synchronize();
  }
  if (can_defer()) {
    // A graph draws anew whenever it runs.
    if (info_.is_sampler && !stream.capturing()) {
      sample_now_write_later(stream);
      return;
    }
    const auto described = describe(
        op_, info_,
        at::ArrayRef<c10::IValue>(stack_.data() + base_, static_cast<size_t>(info_.num_arguments)));
    // An operator that only changes its arguments in place has no new metadata.
    const bool in_place = !info_.has_new_outputs && !info_.has_out_arguments;
    if (described || (in_place && !info_.has_meta_kernel)) {
      queue(stream, described.get());
      return;
    }
  }
  stream.synchronize();
  run_now();
}

// Random numbers are drawn in the order of submission, whatever order the streams run in, as a
// counter-based generator would give them.
void OperatorCall::sample_now_write_later(Stream& stream) {
  bind_cpu_arguments(/*snapshot=*/true);
  const auto written = operands_;
  operands_.clear();
  c10::SmallVector<at::Tensor, 2> samples;
  for (const auto& tensor_argument : info_.tensors) {
    change_tensors(argument(tensor_argument.index), [&](const at::Tensor& alias) {
      at::Tensor sample = at::empty_strided(alias.sizes(), alias.strides(), alias.options());
      samples.push_back(sample);
      return sample;
    });
  }
  {
    KernelScope scope;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
  }
  for (size_t i = 0; i < written.size(); ++i) {
    const at::Tensor& target = written[i].original;
    if (target.sizes() != samples[i].sizes()) {
      set_geometry(target, samples[i].sizes(), samples[i].strides());
    }
    stream.submit(std::make_unique<CopyTask>(info_.name, samples[i], target));
  }
  take_results();
}

void OperatorCall::queue(Stream& stream, const Description* described) {
  const size_t num_returns = info_.returns.size();
  torch::jit::Stack results(num_returns);
  // Outputs take the described size before their memory is aliased.
  for (size_t i = 0; described != nullptr && i < num_returns; ++i) {
    const ReturnValue& info = info_.returns[i];
    if (info.written_argument >= 0 && info.kind == ReturnKind::kTensor) {
      const at::Tensor target = argument(info.written_argument).toTensor();
      const TensorDescription& wanted = (*described)[i][0];
      if (target.defined() && target.sizes() != at::IntArrayRef(wanted.sizes)) {
        set_geometry(target, wanted.sizes, wanted.strides);
      }
    }
  }
  bind_cpu_arguments(/*snapshot=*/true);
  auto task = std::make_unique<OperatorTask>(op_, info_.name);
  for (const auto& operand : operands_) {
    if (operand.writes) {
      task->written.push_back(operand.alias);
    }
  }
  task->arguments.assign(
      std::make_move_iterator(stack_.begin() + static_cast<std::ptrdiff_t>(base_)),
      std::make_move_iterator(stack_.end()));
  torch::jit::drop(stack_, static_cast<size_t>(info_.num_arguments));
  for (size_t i = 0; i < num_returns; ++i) {
    const ReturnValue& info = info_.returns[i];
    if (info.written_argument >= 0) {
      task->expect_nothing();
      results[i] = originals_[static_cast<size_t>(info.written_argument)];
    } else {
      results[i] = task->expect((*described)[i], info.kind, device_);
    }
  }
  stream.submit(std::move(task));
  stack_.insert(
      stack_.end(), std::make_move_iterator(results.begin()),
      std::make_move_iterator(results.end()));
}

}  // namespace vdev
