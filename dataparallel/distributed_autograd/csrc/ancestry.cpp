#include "ancestry.h"

#include <algorithm>

#include "border.h"

namespace dataparallel {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;

Runs to_runs(std::vector<int64_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  Runs runs;
  for (const auto number : numbers) {
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
  live.assign(seen.begin(), seen.end());
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t at = 0; at < live.size(); ++at) {
    const auto found = origins_.find(live[at]);
    if (found == origins_.end()) {
      unknown.push_back(live[at]);
      continue;
    }
    for (const auto origin : from_runs(found->second)) {
      if (seen.insert(origin).second) {
        live.push_back(origin);
      }
    }
  }
}

std::unordered_set<WorkerId> Knowledge::senders() const {
  std::unordered_set<WorkerId> senders;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& entry : log_) {
    senders.insert(maker(entry.part));
  }
  return senders;
}

std::vector<PartId> reached(const edge_list& edges, ContextId context) {
  std::unordered_set<Node*> seen;
  std::unordered_set<PartId> found;
  // Without recursion: graphs are deep.
  std::vector<Edge> queue(edges.begin(), edges.end());
  while (!queue.empty()) {
    const auto edge = queue.back();
    queue.pop_back();
    auto* node = edge.function.get();
    if (node == nullptr) {
      continue;
    }
    if (const auto* receive = dynamic_cast<Receive*>(node)) {
      if (receive->context() == context) {
        found.insert(receive->message() + edge.input_nr);
      }
    } else if (seen.insert(node).second) {
      queue.insert(queue.end(), node->next_edges().begin(), node->next_edges().end());
    }
  }
  return {found.begin(), found.end()};
}

} // namespace dataparallel
