// How this version of torch holds nodes: std::shared_ptr before 2.12, c10::intrusive_ptr since.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

namespace dataparallel {

using NodePointer = std::decay_t<decltype(torch::autograd::Edge::function)>;

template <typename T, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<T>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  }
}

} // namespace dataparallel
