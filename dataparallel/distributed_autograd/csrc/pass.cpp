#include "pass.h"

#include <cmath>

#include <torch/csrc/autograd/functions/basic_ops.h>

#include "threads.h"
#include "worker.h"

namespace dataparallel {

using torch::autograd::AccumulateGrad;
using torch::autograd::GraphRoot;
using torch::autograd::GraphTask;
using torch::autograd::Node;
using torch::autograd::ReadyQueue;

namespace {

// Nothing else uses this slot in a process with Python: it is for runtimes on phones.
const auto kSlot = c10::DebugInfoKind::MOBILE_RUNTIME_INFO;

} // namespace

std::vector<int64_t> Description::to_numbers() const {
  std::vector<int64_t> numbers{pass, retain_graph, static_cast<int64_t>(std::ceil(timeout * 1000))};
  const auto runs = to_runs(live);
  numbers.insert(numbers.end(), runs.begin(), runs.end());
  return numbers;
}

Description Description::from_numbers(const std::vector<int64_t>& numbers) {
  TORCH_CHECK(numbers.size() >= 3, "damaged description of a backward pass");
  return {
      numbers[0],
      numbers[1] != 0,
      static_cast<double>(numbers[2]) / 1000,
      from_runs({numbers.begin() + 3, numbers.end()})};
}

Pass::Pass(std::shared_ptr<Context> context, Description description)
    : context_(std::move(context)),
      description_(std::move(description)),
      queue_(std::make_shared<ReadyQueue>()),
      live_(description_.live.begin(), description_.live.end()),
      deadline_(
          description_.timeout > 0
              ? std::chrono::steady_clock::now() +
                  std::chrono::milliseconds(static_cast<int64_t>(description_.timeout * 1000))
              : std::chrono::steady_clock::time_point::max()) {
  missing_.insert(context_->worker().id());
  if (is_root()) {
    for (const auto part : description_.live) {
      missing_.insert(maker(part));
    }
  }
}

std::shared_ptr<Pass> Pass::current() {
  const auto* info = static_cast<CurrentPass*>(c10::ThreadLocalDebugInfo::get(kSlot));
  return info ? info->pass.lock() : nullptr;
}

NoPass::NoPass() : guard_(kSlot, std::make_shared<CurrentPass>(std::weak_ptr<Pass>())) {}

bool Pass::is_root() const {
  return description_.root() == context_->worker().id();
}

void Pass::start(const std::vector<at::Tensor>& roots) {
  const auto sends = context_->sends(description_.live);
  torch::autograd::edge_list edges;
  torch::autograd::variable_list gradients;
  for (const auto& root : roots) {
    edges.push_back(torch::autograd::impl::gradient_edge(root));
    gradients.push_back(at::ones_like(root, LEGACY_CONTIGUOUS_MEMORY_FORMAT));
  }
  NodePointer root = make_node<GraphRoot>(std::move(edges), std::move(gradients));

  const c10::DebugInfoGuard guard(kSlot, std::make_shared<CurrentPass>(weak_from_this()));
  auto task = make_graph_task(description_.retain_graph, queue_);
  task->outstanding_tasks_ = sends.size();
  stash_current_streams(*task);
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task_ = task;
    awaited_ = sends;
    error = error_;
  }
  std::vector<NodePointer> begins{root};
  for (const auto& send : sends) {
    begins.push_back(send.second);
  }
  count_dependencies(*task, begins);
  if (error) {
    fail_graph_task(task, queue_, error);
  }
  run_in_thread([pass = shared_from_this(), task, root = std::move(root)]() mutable {
    pass->run(std::move(task), std::move(root));
  });
}

void Pass::count_dependencies(GraphTask& task, const std::vector<NodePointer>& roots) {
  std::vector<Node*> queue;
  const auto visit = [&](Node* node) {
    if (task.nodes_in_graph_.insert(node).second) {
      // Every node is needed. An entry for each, instead of none at all, is what makes a
      // re-entrant checkpoint refuse to run: its inner backward would write to `.grad`.
      task.exec_info_[node].needed_ = true;
      queue.push_back(node);
    }
  };
  for (const auto& root : roots) {
    visit(root.get());
  }
  while (!queue.empty()) {
    auto* node = queue.back();
    queue.pop_back();
    if (node->num_outputs() == 0) {
      if (auto* leaf = dynamic_cast<AccumulateGrad*>(node)) {
        collect_in_contexts(*leaf);
      }
      continue;
    }
    for (const auto& edge : node->next_edges()) {
      if (auto* next = edge.function.get()) {
        task.dependencies_[next] += 1;
        visit(next);
      }
    }
  }
}

void Pass::run(Task task, NodePointer root) {
  std::exception_ptr error;
  try {
    run_graph_task(task, queue_, std::move(root));
  } catch (...) {
    error = std::current_exception();
  }
  if (!error && task->future_result_->hasError()) {
    error = task->future_result_->exception_ptr();
  }
  task.reset();
  finish(error);
}

void Pass::finish(std::exception_ptr error) {
  std::vector<at::Tensor> lent;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& entry : lent_) {
      entry.second.depth = 1;
      lent.push_back(entry.second.variable);
    }
  }
  // What a hook that failed has left behind.
  for (const auto& variable : lent) {
    take_back(variable);
  }
  if (error) {
    fail(error);
  }
  // The graph must not outlive the pass, which the caller may keep. Dropped without the lock:
  // nodes and tensors may want the interpreter.
  Task task;
  decltype(awaited_) awaited;
  bool failed;
  bool handed_over;
  std::vector<WorkerId> finished{context_->worker().id()};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    handed_over = handed_over_;
    finished.insert(finished.end(), finished_.begin(), finished_.end());
    task.swap(task_);
    awaited.swap(awaited_);
    failed = error_ != nullptr;
  }
  task.reset();
  awaited.clear();
  if (!is_root() || failed) {
    context_->erase(id());
  }
  if (!is_root() && !failed && !handed_over) {
    send(description_.root(), Notice::kFinished, "", finished);
  }
  settle({context_->worker().id()});
}

void Pass::settle(const std::vector<WorkerId>& workers) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto worker : workers) {
      missing_.erase(worker);
    }
    if (!missing_.empty() || over_) {
      return;
    }
  }
  // Before the caller sees the end, nothing of the pass may be left.
  context_->erase(id());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
}

void Pass::fail(const std::string& text, WorkerId worker) {
  fail(std::make_exception_ptr(std::runtime_error(text)), worker);
}

void Pass::fail(std::exception_ptr error, WorkerId worker) {
  std::unordered_set<WorkerId> others;
  Task task;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_ || (over_ && is_root())) {
      return;
    }
    error_ = error;
    failed_worker_ = worker;
    others = missing_;
    task = task_;
  }
  changed_.notify_all();
  if (task) {
    fail_graph_task(task, queue_, error);
  }
  if (!is_root()) {
    send(description_.root(), Notice::kFailed, describe(error));
    return;
  }
  const auto& own = context_->worker();
  if (!others.count(own.id())) {
    // Its own part has ended before, so nothing else will.
    context_->erase(id());
  }
  for (const auto to : others) {
    if (to != own.id()) {
      send(to, Notice::kCancelled, "worker '" + own.name() + "' cancelled it");
    }
  }
}

bool Pass::wait(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(
      lock, std::chrono::duration<double>(seconds), [&] { return over_ || error_; });
}

std::exception_ptr Pass::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

WorkerId Pass::failed_worker() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failed_worker_;
}

std::vector<WorkerId> Pass::missing() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {missing_.begin(), missing_.end()};
}

bool Pass::overdue() const {
  return std::chrono::steady_clock::now() > deadline_;
}

} // namespace dataparallel
