#include "reach.h"

#include <algorithm>

#include "border.h"
#include "worker.h"

namespace dataparallel {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

std::vector<PartId> Reach::items(const edge_list& edges, Knowledge& knowledge) {
  std::vector<PartId> items;
  // Without recursion: graphs are deep.
  std::vector<std::pair<Node*, size_t>> path;
  const auto enter = [&](Node* node) {
    // What is on the path counts as known too: a graph has no cycles.
    if (node != nullptr && node->num_outputs() > 0 && items_.emplace(node, 0).second) {
      path.emplace_back(node, 0);
    }
  };
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& edge : edges) {
    enter(edge.function.get());
    while (!path.empty()) {
      auto* node = path.back().first;
      if (auto& next = path.back().second; next < node->num_outputs()) {
        enter(node->next_edge(next++).function.get());
      } else {
        items_[node] = joined(*node, knowledge);
        path.pop_back();
      }
    }
    items.push_back(item(edge));
  }
  return items;
}

PartId Reach::received(const Edge& edge) const {
  const auto* receive = dynamic_cast<Receive*>(edge.function.get());
  return receive && receive->context() == context_ ? receive->message() + edge.input_nr : 0;
}

PartId Reach::item(const Edge& edge) const {
  auto* node = edge.function.get();
  if (node == nullptr) {
    return 0;
  }
  return node->num_outputs() == 0 ? received(edge) : items_.at(node);
}

PartId Reach::joined(const Node& node, Knowledge& knowledge) {
  std::vector<PartId> items;
  for (const auto& edge : node.next_edges()) {
    if (const auto found = item(edge)) {
      items.push_back(found);
    }
  }
  std::sort(items.begin(), items.end());
  items.erase(std::unique(items.begin(), items.end()), items.end());
  if (items.size() < 2) {
    return items.empty() ? 0 : items.front();
  }
  for (const auto candidate : items) {
    // A joint that has all the others already, as where a residual ends.
    const auto joint = joints_.find(candidate);
    if (joint != joints_.end() &&
        std::all_of(items.begin(), items.end(), [&](PartId other) {
          return other == candidate ||
              std::binary_search(joint->second.begin(), joint->second.end(), other);
        })) {
      return candidate;
    }
  }
  auto& joint = joint_of_[items];
  if (joint == 0) {
    joint = worker_.next_number() | kJoint;
    joints_.emplace(joint, items);
    knowledge.add(joint, to_runs(items), worker_.id());
  }
  return joint;
}

std::vector<PartId> Reach::reached(const edge_list& edges) const {
  std::unordered_set<Node*> seen;
  std::unordered_set<PartId> found;
  std::vector<Edge> queue(edges.begin(), edges.end());
  std::lock_guard<std::mutex> lock(mutex_);
  while (!queue.empty()) {
    const auto edge = queue.back();
    queue.pop_back();
    auto* node = edge.function.get();
    if (node == nullptr) {
      continue;
    }
    const auto known = items_.find(node);
    if (node->num_outputs() == 0 || known != items_.end()) {
      if (const auto item = known != items_.end() ? known->second : received(edge)) {
        found.insert(item);
      }
    } else if (seen.insert(node).second) {
      queue.insert(queue.end(), node->next_edges().begin(), node->next_edges().end());
    }
  }
  return {found.begin(), found.end()};
}

void Reach::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  items_.clear();
  joints_.clear();
  joint_of_.clear();
}

} // namespace dataparallel
