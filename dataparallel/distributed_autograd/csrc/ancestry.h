// The record of which tensors of a context were computed from which, as far as a worker knows.
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
// A worker may run a node only when all of its gradients are there. So it must know which of the
// tensors that it sent will get one: a tensor that nobody used never will, and waiting for it would
// never end. So each worker records, when it sends a tensor, which received tensors it was computed
// from: an edge of a small graph of the parts of messages. Workers send along with their messages
// the edges that they know, each edge once to each peer. Edges never change after they are made.
// Hence the worker that starts a backward pass knows everything that its roots were computed from.
// It closes over the edges, and tells every worker which parts are live. A worker awaits a message
// if one of its parts is live. It goes on only along live parts, so no node runs that would not run
// in one process. Messages may overtake each other; a worker asks for the edges that it lacks then.
class Knowledge {
 public:
  // Record what a part was computed from, unless that is known.
  void add(PartId part, Runs origins, WorkerId from);
  // Return the edges that neither this worker nor `peer` has told the other; they count as told.
  std::vector<int64_t> news(WorkerId peer);
  void learn(const std::vector<int64_t>& news, WorkerId from);
  Runs origins(PartId part) const;
  // Find the parts that `start` depends on, itself included, and those without an entry.
  void close(
      const std::vector<PartId>& start,
      std::vector<PartId>& live,
      std::vector<PartId>& unknown) const;
  // Return all workers that sent something in the context.
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

// Return the received parts of a context that these edges lead to.
std::vector<PartId> reached(const torch::autograd::edge_list& edges, ContextId context);

} // namespace dataparallel
