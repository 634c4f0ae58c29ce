#include "border.h"

#include "pass.h"

namespace dataparallel {

using torch::autograd::variable_list;

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

variable_list Send::apply(variable_list&& gradients) {
  return std::move(gradients);
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

} // namespace dataparallel
