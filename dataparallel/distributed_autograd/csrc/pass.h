// One backward pass through the part of the graph that one worker has.
#pragma once

#include <condition_variable>

#include <c10/util/ThreadLocalDebugInfo.h>

#include "border.h"
#include "context.h"
#include "torch_engine.h"

namespace dataparallel {

// What every worker must know of a pass.
struct Description {
  PassId pass;
  bool retain_graph;
  double timeout; // seconds from the start; 0: no limit
  std::vector<PartId> live; // ascending

  WorkerId root() const {
    return maker(pass);
  }
  std::vector<int64_t> to_numbers() const;
  static Description from_numbers(const std::vector<int64_t>& numbers);
};

// Tells the nodes that run which pass they belong to, nested backward calls included.
struct CurrentPass : c10::DebugInfoBase {
  explicit CurrentPass(std::weak_ptr<Pass> pass) : pass(std::move(pass)) {}
  std::weak_ptr<Pass> pass;
};

// While one exists, nodes that start to run in this thread belong to no pass.
class NoPass {
 public:
  NoPass();

 private:
  c10::DebugInfoGuard guard_;
};

// Note [Who has finished]
// The root must know when the last worker has done its part. A worker whose part ends with the
// delivery of gradients, as most do, says so in that delivery, and whoever receives it, which
// cannot have finished before, carries the news on with its own end: to the root it costs no
// message of its own. All others send one.
class Pass : public std::enable_shared_from_this<Pass> {
 public:
  Pass(std::shared_ptr<Context> context, Description description);

  // The pass that the node which runs in this thread belongs to, or null.
  static std::shared_ptr<Pass> current();

  // Count the dependencies of all that the roots and the live sends reach, and start the thread.
  void start(const std::vector<at::Tensor>& roots);
  // Gradients for one of this worker's sends have arrived.
  void take(Delivery delivery);
  // Gradients for the tensors of a receive are complete: send them to where the tensors came from.
  void hand_on(const Receive& receive, std::vector<at::Tensor> gradients);
  // A worker that takes part has ended its part, or failed.
  void take(const Notification& notification);
  // End the pass with an error: here, and from here everywhere.
  // `worker` is the other worker that it comes from.
  void fail(std::exception_ptr error, WorkerId worker = -1);
  void fail(const std::string& text, WorkerId worker = -1);

  // Root only: wait until every worker is done or one has failed; false if that takes longer.
  bool wait(double seconds);
  // The error, null if there is none; `failed_worker` is the worker that reported it.
  std::exception_ptr error() const;
  WorkerId failed_worker() const;
  // The workers that have not finished.
  std::vector<WorkerId> missing() const;
  bool overdue() const;

  PassId id() const {
    return description_.pass;
  }
  std::shared_ptr<Context> context() const {
    return context_;
  }

  // See Note [Gradients of leaves]. True if the leaf is lent already, which it then is once more.
  bool lend_again(const at::Tensor& variable);
  void lend(const at::Tensor& variable);
  // Put `.grad` back, at the last of as many calls.
  void take_back(const at::Tensor& variable);

 private:
  struct Loan {
    at::Tensor variable;
    at::Tensor before;
    int depth;
  };
  using Task = std::shared_ptr<torch::autograd::GraphTask>;

  bool is_root() const;
  // Seconds that a message of the pass may take; 0: no limit.
  double patience() const;
  static void count_dependencies(Task::element_type& task, const std::vector<NodePointer>& roots);
  void run(Task task, NodePointer root);
  void finish(std::exception_ptr error);
  // These workers have finished; the pass ends with the last one.
  void settle(const std::vector<WorkerId>& workers);
  // Whether nothing will follow a leaf that runs now.
  bool ends_with(const torch::autograd::Node& leaf);
  void send(
      WorkerId to,
      Notice notice,
      const std::string& text,
      std::vector<WorkerId> finished = {});

  const std::shared_ptr<Context> context_;
  const Description description_;
  const std::shared_ptr<torch::autograd::ReadyQueue> queue_;
  const std::unordered_set<PartId> live_;
  const std::chrono::steady_clock::time_point deadline_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Task task_;
  std::unordered_map<MessageId, NodePointer> awaited_;
  std::unordered_set<MessageId> arrived_;
  std::unordered_set<WorkerId> told_;
  std::unordered_set<WorkerId> missing_;
  bool over_ = false;
  // See Note [Who has finished].
  std::vector<WorkerId> finished_;
  bool handed_over_ = false;
  std::exception_ptr error_;
  WorkerId failed_worker_ = -1;
  std::unordered_map<at::TensorImpl*, Loan> lent_;
};

// An error as text, with the Python traceback where it has one.
std::string describe(const std::exception_ptr& error);

} // namespace dataparallel
