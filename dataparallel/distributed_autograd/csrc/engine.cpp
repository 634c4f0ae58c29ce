#include "engine.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include <ATen/DeviceAccelerator.h>
#include <pthread.h>
#include <pybind11/pybind11.h>

// See Note [Driving torch's engine].
namespace torch::autograd {

namespace {
// The engine numbers its own tasks from zero, and shows ids as int, where ours are negative.
std::atomic<uint64_t> next_task_id{uint64_t{1} << 31};
} // namespace

GraphTask::GraphTask(
    bool keep_graph,
    bool grad_mode,
    int reentrant_depth,
    std::shared_ptr<ReadyQueue> cpu_ready_queue,
    c10::SmallVector<Node*, 4> graph_roots,
    bool exit_on_error)
    : keep_graph_(keep_graph),
      graph_roots_(std::move(graph_roots)),
      reentrant_depth_(reentrant_depth),
      exit_on_error_(exit_on_error),
      cpu_ready_queue_(std::move(cpu_ready_queue)),
      future_result_(c10::make_intrusive<at::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()))),
      id_(next_task_id.fetch_add(1)) {
  thread_locals_.set_grad_mode(grad_mode);
}

int NodeTask::getReentrantDepth() const {
  auto task = base_.lock();
  // The engine's rule: what belongs to no living task comes first, to be out of the way.
  return task ? task->reentrant_depth_ : std::numeric_limits<int>::max();
}

void ReadyQueue::push(NodeTask item, bool incrementOutstandingTasks) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (incrementOutstandingTasks) {
      if (auto task = item.base_.lock()) {
        ++task->outstanding_tasks_;
      }
    }
    heap_.push(std::move(item));
  }
  not_empty_.notify_one();
}

namespace utils {

void DelayWarningHandler::process(const c10::Warning& warning) {
  std::lock_guard<std::mutex> lock(mutex_);
  warnings_.push_back(warning);
}

void DelayWarningHandler::replay_warnings() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& warning : warnings_) {
    c10::warn(warning);
  }
  warnings_.clear();
}

} // namespace utils
} // namespace torch::autograd

namespace dataparallel {

using torch::autograd::Engine;
using torch::autograd::GraphTask;
using torch::autograd::InputBuffer;
using torch::autograd::NodeTask;
using torch::autograd::ReadyQueue;

namespace {

// A protected member: a derived class may hand it on.
struct EngineMembers : Engine {
  using Engine::init_local_ready_queue;
};

// Keep the streams that are current here.
void stash_current_streams(GraphTask& task) {
  const auto accelerator = at::getAccelerator(/*checked=*/false);
  if (!accelerator.has_value()) {
    return;
  }
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface();
  // Without a GPU, a build for CUDA has an accelerator all the same. Tracing puts a guard in its place
  // that counts one device.
  if (!hooks.isAvailable()) {
    return;
  }
  const c10::impl::VirtualGuardImpl guard(accelerator.value());
  const auto count = guard.deviceCount();
  task.caller_current_streams_.resize(count);
  for (c10::DeviceIndex index = 0; index < count; ++index) {
    if (hooks.hasPrimaryContext(index)) {
      task.caller_current_streams_[index] =
          guard.getStream(c10::Device(accelerator.value(), index));
    }
  }
}

// Starting a thread takes as long as a message, so threads are kept: as many as ran at once.
class Threads {
 public:
  void run(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (waiting_.size() >= idle_) {
      std::thread([this] { work(); }).detach();
    }
    waiting_.push_back(std::move(job));
    ++running_;
    arrived_.notify_one();
  }

  bool wait(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return ended_.wait_for(
        lock, std::chrono::duration<double>(seconds), [&] { return running_ == 0; });
  }

 private:
  void work() {
    // The thread has one interpreter state for life, as torch's own engine threads do: it holds an
    // error that Python code raised until the engine has stored that.
    const pybind11::gil_scoped_acquire gil;
    const pybind11::gil_scoped_release no_gil;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      ++idle_;
      arrived_.wait(lock, [&] { return !waiting_.empty(); });
      --idle_;
      auto job = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
      --running_;
      ended_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable ended_;
  std::deque<std::function<void()>> waiting_;
  size_t idle_ = 0;
  size_t running_ = 0;
};

// Never destroyed: its threads wait in it until the process ends. A forked child has none of them.
Threads& threads() {
  static auto* threads = new Threads();
  static const int at_fork = pthread_atfork(nullptr, nullptr, [] { threads = new Threads(); });
  TORCH_CHECK(at_fork == 0, "pthread_atfork failed");
  return *threads;
}

} // namespace

std::optional<c10::Stream> current_stream(const c10::Device& device) {
  if (device.is_cpu()) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

Task make_graph_task(bool keep_graph, Queue queue) {
  auto task = std::make_shared<GraphTask>(
      keep_graph,
      /*grad_mode=*/false,
      /*reentrant_depth=*/0,
      std::move(queue),
      c10::SmallVector<torch::autograd::Node*, 4>{},
      /*exit_on_error=*/true);
  stash_current_streams(*task);
  return task;
}

int id_of(const Task& task) {
  return static_cast<int>(task->id_);
}

void run_graph_task(const Task& task, const Queue& queue, NodePointer root) {
  auto& engine = Engine::get_default_engine();
  (engine.*&EngineMembers::init_local_ready_queue)(queue);
  engine.execute_with_graph_task(task, std::move(root), InputBuffer(0));
  // Else the thread would keep the queue, and in it what a failed task has left.
  (engine.*&EngineMembers::init_local_ready_queue)(std::make_shared<ReadyQueue>());
}

void fail_graph_task(const Task& task, const Queue& queue, std::exception_ptr error) {
  task->has_error_ = true;
  if (!task->future_completed_.exchange(true)) {
    task->future_result_->setError(std::move(error));
  }
  // The owner may be asleep in its queue: an empty task makes it look at the future.
  queue->push(NodeTask(task, NodePointer(), InputBuffer(0)));
}

void run_in_thread(std::function<void()> job) {
  threads().run(std::move(job));
}

bool wait_for_threads(double seconds) {
  return threads().wait(seconds);
}

} // namespace dataparallel
