// Workers, the processes that take part in distributed autograd, and their contexts.
#pragma once

#include <deque>
#include <map>

#include <c10/core/Event.h>

#include "ancestry.h"
#include "engine.h"

namespace dataparallel {

class Pass;
class Worker;

// A distributed autograd context, as one worker has it.
class Context : public std::enable_shared_from_this<Context> {
 public:
  Context(std::shared_ptr<Worker> worker, ContextId id) : worker_(std::move(worker)), id_(id) {}

  ContextId id() const {
    return id_;
  }
  Worker& worker() const {
    return *worker_;
  }
  Knowledge& knowledge() {
    return knowledge_;
  }

  // Record a message with these tensors, all of which require grad, and that its receiver takes
  // part. Return its number, negative without tensors, and the receiver's news; nothing once the
  // context has ended.
  std::optional<std::pair<MessageId, std::vector<int64_t>>> send(
      const std::vector<at::Tensor>& tensors,
      WorkerId to);
  // Give tensors that arrived with a message their gradient function.
  void receive(MessageId message, const std::vector<at::Tensor>& tensors);
  // Return the sends of this worker that these parts belong to.
  std::unordered_map<MessageId, NodePointer> sends(const std::vector<PartId>& live) const;
  // Return the received parts that the roots were computed from.
  std::vector<PartId> reached_by(const std::vector<at::Tensor>& roots) const;

  // Start a pass whose roots are here.
  std::shared_ptr<Pass> start(
      const std::vector<at::Tensor>& roots,
      const std::vector<PartId>& live,
      bool retain_graph,
      double timeout);
  void take(Notice notice);
  void erase(PassId pass);
  std::vector<std::shared_ptr<Pass>> passes() const;

  void accumulate(const at::Tensor& variable, const at::Tensor& gradient);
  // Return the gradient of one leaf, undefined if it has none.
  at::Tensor gradient(const at::Tensor& variable) const;
  void set_gradient(const at::Tensor& variable, at::Tensor gradient);
  // Return all leaves and their gradients, ready on the streams that are current here.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients() const;

  bool released() const {
    return released_;
  }
  // Drop everything that the context holds; passes under way fail. Return all others that are known
  // to take part, including those that only a lost worker has called.
  std::unordered_set<WorkerId> release();

 private:
  struct Leaf {
    at::Tensor variable;
    at::Tensor gradient;
    std::optional<c10::Event> ready;

    // Make the current stream of the gradient's device wait for the gradient.
    void wait() const;
    // Mark the gradient as ready once that stream has come this far.
    void mark();
  };
  // Return the pass of this description, and start it if it is new; null once it has ended.
  std::shared_ptr<Pass> begin(
      const std::vector<int64_t>& description,
      const std::vector<at::Tensor>& roots);

  const std::shared_ptr<Worker> worker_;
  const ContextId id_;
  Knowledge knowledge_;
  std::atomic<bool> released_{false};
  std::atomic<bool> receives_{false};

  mutable std::mutex mutex_;
  // Ordered, to find the message of a part.
  std::map<MessageId, NodePointer> sends_;
  std::unordered_set<WorkerId> peers_;

  mutable std::mutex passes_mutex_;
  std::unordered_map<PassId, std::shared_ptr<Pass>> passes_;
  std::unordered_set<PassId> ended_;

  // Guards the gradients; a sum is computed under it, so two passes add one after the other.
  mutable std::mutex gradients_mutex_;
  std::unordered_map<at::TensorImpl*, Leaf> leaves_;
};

class Worker : public std::enable_shared_from_this<Worker> {
 public:
  Worker(std::string name, WorkerId id) : name_(std::move(name)), id_(id) {}

  const std::string& name() const {
    return name_;
  }
  WorkerId id() const {
    return id_;
  }
  // Return the first of `count` numbers that nothing else has.
  int64_t next_number(int64_t count = 1);

  std::shared_ptr<Context> new_context();
  // Return the context with this number, made if it is new; null if it, or all, were released.
  std::shared_ptr<Context> obtain(ContextId id);
  // Return it likewise, but null if it is unknown.
  std::shared_ptr<Context> find(ContextId id) const;
  // Release a context here and on all workers that are known to take part in it, except for the one
  // that told this worker.
  void release(ContextId id, double timeout, WorkerId told_by = -1);
  // Release every context here without telling the others, and take part in no more.
  void close();

  void take(Notice notice);

  // Return what is under way, by torch's names.
  std::unordered_map<std::string, int64_t> debug_info();

 private:
  // Remove and return a context, which is never made anew; null if it is unknown.
  std::shared_ptr<Context> forget(ContextId id);
  std::vector<std::shared_ptr<Context>> contexts() const;
  void end_overdue_passes();

  const std::string name_;
  const WorkerId id_;

  mutable std::mutex mutex_;
  bool closed_ = false;
  std::unordered_map<ContextId, std::shared_ptr<Context>> contexts_;
  // Late messages must not make a context anew.
  std::unordered_set<ContextId> released_;
  std::deque<ContextId> released_order_;
};

// Return the worker of this process; throw if there is none.
std::shared_ptr<Worker> process_worker();
// Make this the worker of the process, or none, and close the one before.
void set_process_worker(std::shared_ptr<Worker> worker);

} // namespace dataparallel
