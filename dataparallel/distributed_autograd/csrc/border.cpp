#include "border.h"

#include <torch/csrc/utils/pybind.h>

#include "context.h"
#include "pass.h"

namespace dataparallel {

using torch::autograd::AccumulateGrad;
using torch::autograd::variable_list;

namespace {

class ToContext : public torch::autograd::FunctionPreHook {
 public:
  explicit ToContext(AccumulateGrad& leaf) : leaf_(leaf) {}

  variable_list operator()(const variable_list& gradients) override {
    auto pass = Pass::current();
    if (!pass) {
      return gradients;
    }
    if (gradients.at(0).defined()) {
      pass->context()->accumulate(leaf_.variable, gradients[0]);
    }
    return variable_list(gradients.size());
  }

  // There is nothing to compile: no pass runs in a compiled backward.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  // The node owns this hook, and so outlives it.
  AccumulateGrad& leaf_;
};

bool has_post_accumulate_hooks(AccumulateGrad& leaf) {
  if (!leaf.tensor_post_acc_grad_hooks()) {
    return false;
  }
  // The dictionary is there, but all hooks may have been removed from it.
  const pybind11::gil_scoped_acquire gil;
  return pybind11::len(pybind11::cast(leaf.variable).attr("_post_accumulate_grad_hooks")) > 0;
}

} // namespace

Send::Send(const std::vector<at::Tensor>& tensors)
    : Node(torch::autograd::collect_next_edges(tensors)) {
  for (const auto& tensor : tensors) {
    add_input_metadata(tensor);
    devices_.push_back(tensor.device());
  }
}

Send::Send(const Send& whole, const std::vector<bool>& live) : devices_(whole.devices_) {
  for (const auto& metadata : whole.input_metadata_) {
    input_metadata_.emplace_back(metadata);
  }
  auto edges = whole.next_edges();
  for (size_t index = 0; index < edges.size(); ++index) {
    if (!live.at(index)) {
      edges[index] = torch::autograd::Edge();
    }
  }
  set_next_edges(std::move(edges));
}

variable_list Receive::apply(variable_list&& gradients) {
  auto pass = Pass::current();
  TORCH_CHECK(
      pass,
      "this graph contains a tensor that was received from another worker; run its backward with "
      "dataparallel.distributed_autograd.backward(context_id, [loss]) instead of loss.backward()");
  pass->hand_on(*this, std::move(gradients));
  return {};
}

void collect_in_contexts(AccumulateGrad& leaf) {
  TORCH_CHECK(
      !has_post_accumulate_hooks(leaf),
      "a leaf of shape ", leaf.variable.sizes(), " has hooks from "
      "register_post_accumulate_grad_hook(), which read .grad, but distributed autograd puts its "
      "gradient into the context: remove the hooks, and read get_gradients(context_id) after the "
      "backward; register_hook() can change the gradient before");
  // Two passes may reach the same leaf.
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& hook : leaf.pre_hooks()) {
    if (dynamic_cast<ToContext*>(hook.get())) {
      return;
    }
  }
  leaf.add_pre_hook(std::make_unique<ToContext>(leaf));
}

} // namespace dataparallel
