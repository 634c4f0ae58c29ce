// A backward pass through the part of the graph that one worker has.
#pragma once

#include <chrono>
#include <condition_variable>

#include "border.h"
#include "context.h"

namespace dataparallel {

// The facts about a pass that every worker must know.
struct Description {
  PassId pass;
  bool retain_graph;
  double timeout; // seconds from the start; 0: no limit
  std::vector<PartId> live;

  std::vector<int64_t> to_numbers() const;
  static Description from_numbers(const std::vector<int64_t>& numbers);
};

class Pass : public std::enable_shared_from_this<Pass> {
 public:
  Pass(std::shared_ptr<Context> context, Description description);

  // Return the pass of the node that runs in this thread, or null: a backward that the node itself
  // runs belongs to none.
  static std::shared_ptr<Pass> current();

  // Count the dependencies of everything that the roots and the live sends reach; start the thread.
  void start(const std::vector<at::Tensor>& roots);
  void take(Notice notice);
  // Send the gradients of a received message to its sender.
  void hand_on(const Receive& receive, std::vector<at::Tensor> gradients);
  // End the pass with an error, on all workers; `worker` is the one that reported it.
  void fail(std::exception_ptr error, WorkerId worker = -1);
  void fail(const std::string& text, WorkerId worker = -1);

  // Root only: wait until every worker is done or one has failed; return false after `seconds`.
  bool wait(double seconds);
  // Return the error, null if there is none; `failed_worker` is the worker that reported it.
  std::exception_ptr error() const;
  WorkerId failed_worker() const;
  // Return the workers that have not finished.
  std::vector<WorkerId> missing() const;
  bool overdue() const;

  const std::shared_ptr<Context>& context() const {
    return context_;
  }

 private:
  WorkerId root() const {
    return maker(description_.pass);
  }
  bool is_root() const;
  // True if nothing of this worker's part is left to do after this node, which runs.
  bool ends_with(const torch::autograd::Node& node) const;
  void run(const Task& task, NodePointer root);
  void finish(std::exception_ptr error);
  // Note that a worker has finished; the pass ends with the last one.
  void settle(WorkerId worker);
  void tell(WorkerId to, Kind kind, std::string text = {});
  // Return the seconds that a notice of the pass may take; 0: no limit.
  double patience() const;

  const std::shared_ptr<Context> context_;
  const Description description_;
  const Queue queue_;
  const std::unordered_set<PartId> live_;
  const std::chrono::steady_clock::time_point deadline_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Task task_;
  // The sends whose gradients have not arrived.
  std::unordered_map<MessageId, NodePointer> awaited_;
  std::unordered_set<WorkerId> missing_;
  // True if the root knows, or will by gradients under way, that this worker has finished.
  bool reported_ = false;
  bool over_ = false;
  std::exception_ptr error_;
  WorkerId failed_worker_ = -1;
};

// Return an error as text, with the Python traceback if it has one.
std::string describe(const std::exception_ptr& error);

} // namespace dataparallel
