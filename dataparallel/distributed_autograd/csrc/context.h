// One distributed autograd context, as one worker has it.
#pragma once

#include <map>

#include <c10/core/Event.h>

#include "ancestry.h"

namespace dataparallel {

class Pass;

class Context : public std::enable_shared_from_this<Context> {
 public:
  Context(std::shared_ptr<Worker> worker, ContextId id);

  ContextId id() const {
    return id_;
  }
  Worker& worker() const {
    return *worker_;
  }
  Knowledge& knowledge() {
    return knowledge_;
  }

  // Record that these tensors, all of which require grad, are sent. Negative, and nothing
  // recorded, once the context was released.
  MessageId add_send(const std::vector<at::Tensor>& tensors);
  // Give tensors that arrived with a message their gradient function.
  void add_receive(MessageId message, const std::vector<at::Tensor>& tensors);
  // Remember that `peer` takes part in the context, so that it is told when the context ends;
  // false if it has ended.
  bool meet(WorkerId peer);
  // The sends of those of these parts that are of this worker's messages.
  std::unordered_map<MessageId, NodePointer> sends(const std::vector<PartId>& live) const;
  // What the roots were computed from: parts and joints.
  std::vector<PartId> reached_by(const std::vector<at::Tensor>& roots) const;

  // Start a pass whose roots are here.
  std::shared_ptr<Pass> start(
      const std::vector<at::Tensor>& roots,
      const std::vector<PartId>& live,
      bool retain_graph,
      double timeout);
  void take(Delivery delivery);
  void take(const Notification& notification);
  void erase(PassId pass);
  std::vector<std::shared_ptr<Pass>> passes() const;

  void accumulate(const at::Tensor& variable, const at::Tensor& gradient);
  // The gradient of one leaf, undefined if it has none.
  at::Tensor gradient(const at::Tensor& variable) const;
  void set_gradient(const at::Tensor& variable, at::Tensor gradient);
  // All leaves and their gradients, ready on the streams that are current here.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;

  bool released() const {
    return released_;
  }
  // Drop all that the context holds; passes under way fail. Returns all others that are known to
  // take part: not only those that were called, who may be lost, and with them who they called.
  std::unordered_set<WorkerId> release();

 private:
  struct Leaf {
    at::Tensor variable;
    at::Tensor gradient;
    std::optional<c10::Event> ready;

    // Let the stream that is current on the gradient's device wait until it is there.
    void wait() const;
    // Note that it is there once that stream has come this far.
    void mark();
  };
  std::shared_ptr<Pass> begin(
      const std::vector<int64_t>& description,
      const std::vector<at::Tensor>& roots);

  const std::shared_ptr<Worker> worker_;
  const ContextId id_;
  Knowledge knowledge_;
  Reach reach_;
  std::atomic<bool> released_{false};
  std::atomic<int64_t> receives_{0};

  mutable std::mutex mutex_;
  // Ordered, to find the message of a part.
  std::map<MessageId, NodePointer> sends_;
  std::unordered_set<WorkerId> peers_;

  // Held while a pass is prepared, so that it is prepared once.
  std::mutex beginning_;
  mutable std::mutex passes_mutex_;
  std::unordered_map<PassId, std::shared_ptr<Pass>> passes_;
  std::unordered_map<PassId, std::vector<Delivery>> early_;
  std::unordered_set<PassId> ended_;

  // Guards the gradients; a sum is computed under it, so two passes add one after the other.
  mutable std::mutex gradients_mutex_;
  std::unordered_map<at::TensorImpl*, Leaf> leaves_;
};

} // namespace dataparallel
