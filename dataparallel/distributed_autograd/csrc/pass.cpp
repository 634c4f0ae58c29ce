#include "pass.h"

#include <cmath>

#include <torch/csrc/autograd/functions/basic_ops.h>

#include "streams.h"
#include "threads.h"
#include "worker.h"

namespace dataparallel {

using torch::autograd::AccumulateGrad;
using torch::autograd::GraphRoot;
using torch::autograd::GraphTask;
using torch::autograd::InputBuffer;
using torch::autograd::Node;
using torch::autograd::NodeTask;
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

// --- what travels between workers

double Pass::patience() const {
  // Longer than the root's, which names all that have not finished and not only one.
  constexpr double kMore = 2;
  return description_.timeout > 0 ? description_.timeout + kMore : 0;
}

void Pass::take(Delivery delivery) {
  const auto message = delivery.message;
  auto& gradients = delivery.gradients;
  NodePointer node;
  Task task;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) {
      return;
    }
    const auto found = awaited_.find(message);
    TORCH_CHECK(
        found != awaited_.end(), "worker '", context_->worker().name(),
        "' does not await gradients for message ", message);
    TORCH_CHECK(arrived_.insert(message).second, "gradients for message ", message, " came twice");
    if (!is_root()) {
      finished_.insert(finished_.end(), delivery.finished.begin(), delivery.finished.end());
      delivery.finished.clear();
    }
    node = found->second;
    task = task_;
  }
  TORCH_CHECK(
      gradients.size() == node->num_inputs(), "message ", message, " had ", node->num_inputs(),
      " tensors that require grad, and ", gradients.size(), " gradients arrived for it");
  const auto& send = static_cast<Send&>(*node);
  InputBuffer buffer(gradients.size());
  for (size_t index = 0; index < gradients.size(); ++index) {
    if (gradients[index].defined()) {
      auto gradient = gradients[index].to(send.device_of(index));
      gradients[index].reset();
      const auto producer = current_stream(gradient.device());
      buffer.add(index, std::move(gradient), producer, node->stream(), node.get());
    }
  }
  queue_->push(NodeTask(task, node, std::move(buffer)), /*incrementOutstandingTasks=*/false);
  settle(delivery.finished);
}

void Pass::hand_on(const Receive& receive, std::vector<at::Tensor> gradients) {
  const auto message = receive.message();
  bool live = false;
  for (PartId part = message; part < message + receive.num_inputs(); ++part) {
    live = live || live_.count(part);
  }
  TORCH_CHECK(
      receive.context() == context_->id() && live,
      "backward reached a tensor that was received in another context, or after this backward ",
      "began; received tensors belong to the context that they came with");
  const auto to = maker(message);
  auto& worker = context_->worker();
  Delivery delivery{worker.id(), context_->id(), id(), message, std::move(gradients), {}, {}};
  if (to == worker.id()) {
    context_->take(std::move(delivery));
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (told_.insert(to).second) {
      delivery.description = description_.to_numbers();
    }
  }
  if (!is_root() && ends_with(receive)) {
    std::lock_guard<std::mutex> lock(mutex_);
    finished_.push_back(worker.id());
    delivery.finished.swap(finished_);
    handed_over_ = true;
  }
  worker.message_left();
  auto done = [pass = shared_from_this(), to](const std::string& error) {
    auto& worker = pass->context_->worker();
    worker.message_arrived();
    if (!error.empty()) {
      pass->fail(
          "worker '" + worker.name() + "' could not hand gradients to worker '" +
              worker_name(to) + "': " + error,
          to);
    }
  };
  deliver(to, std::move(delivery), patience(), std::move(done));
}

bool Pass::ends_with(const Node& leaf) {
  Task task;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task = task_;
  }
  if (!task || task->outstanding_tasks_ != 1 || !leaf.post_hooks().empty()) {
    return false;
  }
  std::lock_guard<std::mutex> lock(task->final_callbacks_lock_);
  return task->final_callbacks_.empty();
}

void Pass::take(const Notification& notification) {
  if (notification.notice == Notice::kCancelled) {
    fail(notification.text);
    return;
  }
  if (notification.notice == Notice::kFailed) {
    fail(notification.text, notification.sender);
  }
  settle(notification.finished);
}

void Pass::send(
    WorkerId to,
    Notice notice,
    const std::string& text,
    std::vector<WorkerId> finished) {
  auto& worker = context_->worker();
  worker.message_left();
  auto done = [owner = worker.shared_from_this()](const std::string&) {
    // Where the other side is gone there is nobody to tell; the root finds that out by itself.
    owner->message_arrived();
  };
  notify(
      to,
      {worker.id(), context_->id(), id(), notice, text, std::move(finished)},
      patience(),
      std::move(done));
}

} // namespace dataparallel
