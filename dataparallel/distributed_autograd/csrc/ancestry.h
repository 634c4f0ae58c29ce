// Which tensors of a context were computed from which, as far as this worker knows.
#pragma once

#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include "messages.h"

namespace dataparallel {

// Numbers in ascending order, as runs of consecutive ones: first, count, first, count ...
using Runs = std::vector<int64_t>;
Runs to_runs(std::vector<int64_t> numbers);
std::vector<int64_t> from_runs(const Runs& runs);

// Note [Live sends]
// A worker may run a node only when all of its gradients are there, so it must know which of the
// tensors that it sent will get one: a tensor that nobody used never will, and waiting for it would
// be for ever. So each worker records, when it sends a tensor, which received tensors it was
// computed from: an edge of a small graph of the parts of messages. What a worker
// knows of that graph travels with its messages, each edge once to each peer. Edges never change
// after they are made. Hence the worker that starts a backward pass knows all that its roots were
// computed from, closes over the edges, and tells every worker which parts are live. A worker awaits
// a message if one of its parts is live, and goes on only along those that are, so that no node
// runs that would not in one process. Messages may overtake each other; edges that are then
// unknown are asked for.
class Knowledge {
 public:
  // Record what a part was computed from; nothing where it is known.
  void add(PartId part, Runs origins, WorkerId from);
  // All that `peer` has not been told by this worker nor has told it; told from now on.
  std::vector<int64_t> news(WorkerId peer);
  void learn(const std::vector<int64_t>& news, WorkerId from);
  Runs origins(PartId part) const;
  // The parts that `start` depends on, itself included, and those without an entry.
  void close(
      const std::vector<PartId>& start,
      std::vector<PartId>& live,
      std::vector<PartId>& unknown) const;
  // All workers that sent something in the context.
  std::unordered_set<WorkerId> senders() const;

 private:
  struct Entry {
    PartId part;
    WorkerId from;
  };
  mutable std::mutex mutex_;
  std::unordered_map<PartId, Runs> origins_;
  std::vector<Entry> log_;
  std::unordered_map<WorkerId, size_t> told_;
};

// The received parts of a context that these edges lead to.
std::vector<PartId> reached(const torch::autograd::edge_list& edges, ContextId context);

} // namespace dataparallel
