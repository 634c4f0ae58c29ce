// The borders of a worker's graph: where gradients arrive from another worker, and where they leave.
#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "messages.h"
#include "node_pointer.h"

namespace dataparallel {

// Stands for the tensors of a message that this worker sent. In backward their gradients arrive
// here; it hands them to the nodes that made the tensors.
class Send : public torch::autograd::Node {
 public:
  explicit Send(const std::vector<at::Tensor>& tensors);
  // The same without what only dead parts lead to; see Note [Live sends].
  Send(const Send& whole, const std::vector<bool>& live);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override {
    return "dataparallel::Send";
  }
  // What the gradient of tensor `index` must look like here.
  c10::Device device_of(size_t index) const {
    return devices_.at(index);
  }

 private:
  std::vector<c10::Device> devices_;
};

// Stands for the tensors of a message that this worker received. In backward it sends their
// gradients to the worker that sent them.
class Receive : public torch::autograd::Node {
 public:
  Receive(ContextId context, MessageId message) : context_(context), message_(message) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override {
    return "dataparallel::Receive";
  }
  ContextId context() const {
    return context_;
  }
  MessageId message() const {
    return message_;
  }

 private:
  ContextId context_;
  MessageId message_;
};

// See Note [Gradients of leaves].
void collect_in_contexts(torch::autograd::AccumulateGrad& leaf);

} // namespace dataparallel
