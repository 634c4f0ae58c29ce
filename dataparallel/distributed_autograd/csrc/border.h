// The places where a pass enters and leaves a worker's graph: the tensors that it sent, those that
// it received, and its leaves.
#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "engine.h"
#include "messages.h"

namespace dataparallel {

// The node that stands for the tensors of a message that this worker sent. In backward it gets
// their gradients, and hands them to the nodes that made the tensors.
class Send : public torch::autograd::Node {
 public:
  explicit Send(const std::vector<at::Tensor>& tensors);
  // Copy a node without the edges that only dead parts lead to; see Note [Live sends].
  Send(const Send& whole, const std::vector<bool>& live);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override {
    return "dataparallel::Send";
  }
  // Return the device on which the gradient of tensor `index` must be.
  c10::Device device_of(size_t index) const {
    return devices_.at(index);
  }

 private:
  std::vector<c10::Device> devices_;
};

// The node that stands for the tensors of a message that this worker received. In backward it sends
// their gradients to the worker that sent them.
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

// Note [Gradients of leaves]
// In a distributed backward pass gradients belong to the context, never to `.grad`. Each
// AccumulateGrad node that a pass will reach gets a hook, once, which does nothing in an ordinary
// backward. The hook runs after the leaf's own pre hooks that were there when a pass first reached
// it: the list may not change while it is in use. It adds the gradient to the context and returns
// an undefined one, for which the node leaves `.grad` alone. The node would still call the leaf's
// post-accumulate hooks, which are written for `.grad`: a pass refuses leaves that have any.
void collect_in_contexts(torch::autograd::AccumulateGrad& leaf);

} // namespace dataparallel
