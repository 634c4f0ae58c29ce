#include "ancestry.h"

#include <algorithm>

#include "border.h"
#include "worker.h"

namespace dataparallel {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

Runs to_runs(const std::vector<int64_t>& ascending) {
  Runs runs;
  for (const auto number : ascending) {
    if (!runs.empty() && runs[runs.size() - 2] + runs.back() == number) {
      ++runs.back();
    } else {
      runs.push_back(number);
      runs.push_back(1);
    }
  }
  return runs;
}

std::vector<int64_t> from_runs(const Runs& runs) {
  TORCH_CHECK(runs.size() % 2 == 0, "damaged list of numbers");
  std::vector<int64_t> numbers;
  for (size_t at = 0; at < runs.size(); at += 2) {
    for (int64_t offset = 0; offset < runs[at + 1]; ++offset) {
      numbers.push_back(runs[at] + offset);
    }
  }
  return numbers;
}

void Knowledge::add(PartId part, Runs origins, WorkerId from) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (origins_.emplace(part, std::move(origins)).second) {
    log_.push_back({part, from});
  }
}

std::vector<int64_t> Knowledge::news(WorkerId peer) {
  std::vector<int64_t> news;
  std::lock_guard<std::mutex> lock(mutex_);
  auto& told = told_[peer];
  for (; told < log_.size(); ++told) {
    const auto& entry = log_[told];
    if (entry.from == peer) {
      continue;
    }
    const auto& origins = origins_.at(entry.part);
    news.push_back(entry.part);
    news.push_back(static_cast<int64_t>(origins.size()));
    news.insert(news.end(), origins.begin(), origins.end());
  }
  return news;
}

void Knowledge::learn(const std::vector<int64_t>& news, WorkerId from) {
  for (size_t at = 0; at + 1 < news.size();) {
    const auto part = news[at];
    const auto begin = at + 2;
    const auto end = begin + static_cast<size_t>(news[at + 1]);
    TORCH_CHECK(news[at + 1] >= 0 && end <= news.size(), "damaged message of worker ", from);
    add(part, {news.begin() + begin, news.begin() + end}, from);
    at = end;
  }
}

Runs Knowledge::origins(PartId part) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = origins_.find(part);
  TORCH_CHECK(found != origins_.end(), "message ", part, " is not known to this worker");
  return found->second;
}

void Knowledge::close(
    const std::vector<PartId>& start,
    std::vector<PartId>& live,
    std::vector<PartId>& unknown) const {
  std::unordered_set<PartId> seen(start.begin(), start.end());
  std::vector<PartId> queue(seen.begin(), seen.end());
  std::lock_guard<std::mutex> lock(mutex_);
  while (!queue.empty()) {
    const auto part = queue.back();
    queue.pop_back();
    if ((part & kJoint) == 0) {
      live.push_back(part);
    }
    const auto found = origins_.find(part);
    if (found == origins_.end()) {
      unknown.push_back(part);
      continue;
    }
    for (const auto origin : from_runs(found->second)) {
      if (seen.insert(origin).second) {
        queue.push_back(origin);
      }
    }
  }
  std::sort(live.begin(), live.end());
}

std::unordered_set<WorkerId> Knowledge::senders() const {
  std::unordered_set<WorkerId> senders;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& entry : log_) {
    senders.insert(maker(entry.part));
  }
  return senders;
}

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
