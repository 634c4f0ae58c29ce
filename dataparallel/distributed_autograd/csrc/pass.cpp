#include "pass.h"

#include <cmath>

#include <torch/csrc/autograd/functions/basic_ops.h>

namespace dataparallel {

using torch::autograd::AccumulateGrad;
using torch::autograd::GraphRoot;
using torch::autograd::GraphTask;
using torch::autograd::InputBuffer;
using torch::autograd::Node;
using torch::autograd::NodeTask;
using torch::autograd::ReadyQueue;

namespace {

// The passes that run, by the ids of their tasks.
std::mutex running_mutex;
std::unordered_map<int, std::weak_ptr<Pass>> running_passes;

// Enter every node that `roots` lead to into a task.
void count_dependencies(GraphTask& task, const std::vector<NodePointer>& roots) {
  std::vector<Node*> queue;
  const auto visit = [&](Node* node) {
    if (task.nodes_in_graph_.insert(node).second) {
      // Every node is needed. An entry for each, instead of none at all, makes a re-entrant
      // checkpoint refuse to run: its inner backward would write to `.grad`.
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
    if (auto* leaf = dynamic_cast<AccumulateGrad*>(node)) {
      collect_in_contexts(*leaf);
    }
    for (const auto& edge : node->next_edges()) {
      if (auto* next = edge.function.get()) {
        task.dependencies_[next] += 1;
        visit(next);
      }
    }
  }
}

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
  const auto id = torch::autograd::get_current_graph_task_id();
  std::lock_guard<std::mutex> lock(running_mutex);
  const auto found = running_passes.find(id);
  return found == running_passes.end() ? nullptr : found->second.lock();
}

bool Pass::is_root() const {
  return root() == context_->worker().id();
}

void Pass::start(const std::vector<at::Tensor>& roots) {
  auto sends = context_->sends(description_.live);
  torch::autograd::edge_list edges;
  torch::autograd::variable_list gradients;
  for (const auto& root : roots) {
    edges.push_back(torch::autograd::impl::gradient_edge(root));
    gradients.push_back(at::ones_like(root, LEGACY_CONTIGUOUS_MEMORY_FORMAT));
  }
  NodePointer root = make_node<GraphRoot>(std::move(edges), std::move(gradients));
  std::vector<NodePointer> begins{root};
  for (const auto& send : sends) {
    begins.push_back(send.second);
  }
  auto task = make_graph_task(description_.retain_graph, queue_);
  task->outstanding_tasks_ = sends.size();
  count_dependencies(*task, begins);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task_ = task;
    awaited_ = std::move(sends);
  }
  {
    std::lock_guard<std::mutex> lock(running_mutex);
    running_passes.emplace(id_of(task), weak_from_this());
  }
  run_in_thread([pass = shared_from_this(), task = std::move(task), root]() mutable {
    pass->run(std::exchange(task, nullptr), std::move(root));
  });
}

void Pass::run(const Task& task, NodePointer root) {
  std::exception_ptr error;
  try {
    run_graph_task(task, queue_, std::move(root));
  } catch (...) {
    error = std::current_exception();
  }
  if (!error && task->future_result_->hasError()) {
    error = task->future_result_->exception_ptr();
  }
  {
    std::lock_guard<std::mutex> lock(running_mutex);
    running_passes.erase(id_of(task));
  }
  finish(error);
}

void Pass::finish(std::exception_ptr error) {
  if (error) {
    fail(error);
  }
  // The caller may keep the pass, but the pass must not keep the graph. It is freed without the
  // lock: nodes and tensors may want the interpreter.
  Task task;
  decltype(awaited_) awaited;
  bool failed;
  bool reported;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task.swap(task_);
    awaited.swap(awaited_);
    failed = error_ != nullptr;
    reported = reported_;
  }
  task.reset();
  awaited.clear();
  if (!is_root() || failed) {
    context_->erase(description_.pass);
  }
  if (!is_root() && !failed && !reported) {
    tell(root(), Kind::kFinished);
  }
  settle(context_->worker().id());
}

void Pass::settle(WorkerId worker) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    missing_.erase(worker);
    if (!missing_.empty() || over_) {
      return;
    }
  }
  // Nothing of the pass may be left when the caller sees its end.
  context_->erase(description_.pass);
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
    tell(root(), Kind::kFailed, describe(error));
    return;
  }
  const auto& own = context_->worker();
  if (!others.erase(own.id())) {
    // The root's own part has ended, so nothing else will remove the pass.
    context_->erase(description_.pass);
  }
  for (const auto to : others) {
    tell(to, Kind::kCancelled, "worker '" + own.name() + "' cancelled it");
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
  // The root's patience ends first: its error names all that have not finished, and not only one.
  constexpr double kMore = 2;
  return description_.timeout > 0 ? description_.timeout + kMore : 0;
}

void Pass::take(Notice notice) {
  if (notice.kind == Kind::kCancelled) {
    fail(notice.text);
    return;
  }
  if (notice.kind == Kind::kFailed) {
    fail(notice.text, notice.sender);
    return;
  }
  if (notice.kind == Kind::kFinished) {
    settle(notice.sender);
    return;
  }
  NodePointer node;
  Task task;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) {
      return;
    }
    auto entry = awaited_.extract(notice.message);
    TORCH_CHECK(
        entry, "worker '", context_->worker().name(), "' does not await gradients for message ",
        notice.message);
    node = std::move(entry.mapped());
    task = task_;
  }
  auto& gradients = notice.gradients;
  TORCH_CHECK(
      gradients.size() == node->num_inputs(), "message ", notice.message, " had ",
      node->num_inputs(), " tensors that require grad, and ", gradients.size(),
      " gradients arrived for it");
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
  if (notice.finished) {
    settle(notice.sender);
  }
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
  Notice notice{Kind::kGradients, worker.id(), context_->id(), description_.pass};
  notice.message = message;
  notice.gradients = std::move(gradients);
  notice.description = description_.to_numbers();
  if (to == worker.id()) {
    context_->take(std::move(notice));
    return;
  }
  // The root waits for each worker's end. Sent along with gradients, it costs no message.
  if (to == root() && ends_with(receive)) {
    notice.finished = true;
    std::lock_guard<std::mutex> lock(mutex_);
    reported_ = true;
  }
  auto done = [pass = shared_from_this(), to](const std::string& error) {
    if (!error.empty()) {
      pass->fail(
          "worker '" + pass->context_->worker().name() + "' could not hand gradients to worker '" +
              worker_name(to) + "': " + error,
          to);
    }
  };
  post(to, std::move(notice), patience(), std::move(done));
}

bool Pass::ends_with(const Node& node) const {
  Task task;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task = task_;
  }
  // Hooks of the node and callbacks of the engine still run, and may fail.
  if (!task || task->outstanding_tasks_ != 1 || !node.post_hooks().empty()) {
    return false;
  }
  std::lock_guard<std::mutex> lock(task->final_callbacks_lock_);
  return task->final_callbacks_.empty();
}

void Pass::tell(WorkerId to, Kind kind, std::string text) {
  Notice notice{kind, context_->worker().id(), context_->id(), description_.pass, std::move(text)};
  post(to, std::move(notice), patience());
}

} // namespace dataparallel
