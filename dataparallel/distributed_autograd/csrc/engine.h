// The parts of torch's autograd engine that are used beyond its public functions: what
// torch_internals.py is for Python.
//
// Note [Driving torch's engine]
// A backward pass over several workers is, on each of them, one GraphTask of torch's own engine:
// torch's threads run the nodes, with its hooks, streams and anomaly mode. Only the moment at which
// a task becomes ready is ours. `outstanding_tasks_` counts the sends whose gradients will arrive,
// so the task stays open for them, and each arrival pushes the node of its send. The thread that
// owns the task sleeps in the engine's loop between arrivals. Nodes that device threads hand back
// to the CPU go to the same queue, so CPU -> GPU -> CPU chains need no help.
//
// The engine exports its loop, but not the constructor of GraphTask nor the push of a ReadyQueue.
// Both are declared in torch's headers, hidden in its library and hence ours to define, for this
// extension alone: engine.cpp.
//
// Note [Names of torch's engine]
// In this file and engine.cpp: the constructor of GraphTask, ReadyQueue::push, NodeTask's depth,
// DelayWarningHandler, Engine::execute_with_graph_task and init_local_ready_queue, and the members
// future_result_, future_completed_, has_error_ and caller_current_streams_. pass.cpp fills in what
// Engine::compute_dependencies and init_to_execute would: dependencies_, exec_info_ and
// outstanding_tasks_, and pushes NodeTasks. Torch 2.11 to 2.15 have all of them. If one is missing
// or has another signature, the extension does not compile, and the error names the version of
// torch. So none of that can fail as late as at run time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>

namespace dataparallel {

using Task = std::shared_ptr<torch::autograd::GraphTask>;
using Queue = std::shared_ptr<torch::autograd::ReadyQueue>;

// The pointer to nodes in this torch: std::shared_ptr before 2.12, c10::intrusive_ptr since.
using NodePointer = std::decay_t<decltype(torch::autograd::Edge::function)>;

template <typename T, typename... Arguments>
NodePointer make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<T>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  }
}

// Return the stream that this thread queues work on; none on the CPU, which has no streams.
std::optional<c10::Stream> current_stream(const c10::Device& device);

// Make a task with an id that no task of the engine has. At its end, the streams that are current
// here wait for its gradients.
Task make_graph_task(bool keep_graph, Queue queue);

// Return a task's id, as get_current_graph_task_id() tells it to the nodes of the task.
int id_of(const Task& task);

// Run the task in this thread, from `root`, until it is complete or has failed.
void run_graph_task(const Task& task, const Queue& queue, NodePointer root);

// End the task with an error, from any thread; the first error counts.
void fail_graph_task(const Task& task, const Queue& queue, std::exception_ptr error);

// Run `job` in a thread of its own: at once, whatever else runs, since passes wait for each other.
void run_in_thread(std::function<void()> job);

// Wait until no job runs; return false if that takes longer than `seconds`.
bool wait_for_threads(double seconds);

} // namespace dataparallel
