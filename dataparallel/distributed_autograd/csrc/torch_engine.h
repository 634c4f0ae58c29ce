// What we use of torch's autograd engine beyond its public functions; the counterpart of
// torch_internals.py for C++.
//
// Note [Driving torch's engine]
// A backward pass over several workers is, on each of them, one GraphTask of torch's own engine:
// torch's threads run the nodes, with its hooks, streams and anomaly mode. What is ours is only
// when a task begins to be ready: `outstanding_tasks_` counts the sends whose gradients will
// arrive, so the task stays open for them, and each arrival pushes the node of its send. The
// thread that owns the task sleeps in the engine's loop between arrivals; nodes that device
// threads hand back to the CPU go to the same queue, so CPU -> GPU -> CPU chains need no help.
//
// The engine exports its loop, but not the constructor of GraphTask nor the push of a ReadyQueue.
// Both are declared in torch's headers, hidden in its library and hence ours to define, for this
// extension alone: torch_engine.cpp.
//
// Note [What of torch's engine is used]
// In this file and torch_engine.cpp: the constructor of GraphTask, ReadyQueue::push, NodeTask's
// depth, DelayWarningHandler, Engine::execute_with_graph_task and init_local_ready_queue, and the
// members future_result_, future_completed_, has_error_ and caller_current_streams_. How a torch
// holds nodes, which changed in 2.12, is in node_pointer.h. pass.cpp fills in what
// Engine::compute_dependencies and init_to_execute would: dependencies_, exec_info_ and
// outstanding_tasks_, pushes NodeTasks and looks at final_callbacks_. Torch 2.11
// to 2.15 have all of them. Where one is missing or has another signature, the extension does not
// compile, and the error names the version of torch; nothing of it is found out at run time.
#pragma once

#include <torch/csrc/autograd/engine.h>

#include "node_pointer.h"

namespace dataparallel {

std::shared_ptr<torch::autograd::GraphTask> make_graph_task(
    bool keep_graph,
    std::shared_ptr<torch::autograd::ReadyQueue> queue);

// Keep the streams that are current here, so that they wait for the gradients at the end.
void stash_current_streams(torch::autograd::GraphTask& task);

// Run the task in this thread, from `root`, until it is complete or has failed.
void run_graph_task(
    const std::shared_ptr<torch::autograd::GraphTask>& task,
    const std::shared_ptr<torch::autograd::ReadyQueue>& queue,
    NodePointer root);

// End the task with an error, from any thread; true for the first error only.
bool fail_graph_task(
    const std::shared_ptr<torch::autograd::GraphTask>& task,
    const std::shared_ptr<torch::autograd::ReadyQueue>& queue,
    std::exception_ptr error);

} // namespace dataparallel
