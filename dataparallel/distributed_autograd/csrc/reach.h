// Which received tensors the nodes of a worker's graph were computed from.
#pragma once

#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "knowledge.h"

namespace dataparallel {

// Note [Items]
// The graph of a worker goes on from send to send, so what a node was computed from is kept: each
// node is visited once in a context. It is one number, the node's item: none; a received part; or,
// where several items meet, a joint, a number of its own whose origins are those items. Joints are
// known to the other workers as parts are, but nothing is ever sent or awaited for them. So each
// send tells of one item and of the joints that are new, however long its graph is.
//
// Nodes are known by address. Those that a send reaches live as long as the send, and sends as long
// as the context.
class Reach {
 public:
  Reach(ContextId context, Worker& worker) : context_(context), worker_(worker) {}

  // The item of each edge of a send, 0 for none; its joints are entered in `knowledge`.
  std::vector<PartId> items(const torch::autograd::edge_list& edges, Knowledge& knowledge);
  // The items that these edges lead to. Nothing of this is kept: a root may not live.
  std::vector<PartId> reached(const torch::autograd::edge_list& edges) const;
  void clear();

 private:
  PartId received(const torch::autograd::Edge& edge) const;
  PartId item(const torch::autograd::Edge& edge) const;
  PartId joined(const torch::autograd::Node& node, Knowledge& knowledge);

  const ContextId context_;
  Worker& worker_;
  mutable std::mutex mutex_;
  std::unordered_map<torch::autograd::Node*, PartId> items_;
  std::unordered_map<PartId, std::vector<PartId>> joints_;
  std::map<std::vector<PartId>, PartId> joint_of_;
};

} // namespace dataparallel
