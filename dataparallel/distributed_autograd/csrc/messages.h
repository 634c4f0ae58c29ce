// The notices between workers during and after a backward pass, through torch.distributed.rpc.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace dataparallel {

using WorkerId = int64_t;
using ContextId = int64_t;
using MessageId = int64_t;
// One tensor of a message: the message's number and the tensor's place in it, added up.
using PartId = int64_t;
using PassId = int64_t;

// Contexts, messages and passes are numbered by the worker that makes them, whose id stands in the
// upper bits. So the numbers of two workers never collide, and a message tells who sent it.
constexpr int kCounterBits = 47;
inline WorkerId maker(int64_t number) {
  return number >> kCounterBits;
}

enum class Kind : int64_t { kGradients, kFinished, kFailed, kCancelled, kReleased };

// A notice from one worker to another about a pass, or about a context.
struct Notice {
  Kind kind;
  WorkerId sender;
  ContextId context;
  PassId pass = 0;
  // The reason why a pass has failed or was cancelled.
  std::string text = {};
  // The gradients of one message, on their way back to its sender.
  MessageId message = 0;
  std::vector<at::Tensor> gradients = {};
  // With gradients: the facts that their receiver needs to take part in the pass.
  std::vector<int64_t> description = {};
  // With gradients: true if their sender has nothing left to do in the pass.
  bool finished = false;
};

// A function that gets an empty text once the other side has taken a notice, else the error.
using Acknowledge = std::function<void(const std::string&)>;

// Note [Notices as calls of an operator]
// torch's RPC runs a registered operator without Python: the receiving process runs it in a thread
// of its pool, and never asks for the interpreter. So notices are calls of an operator, and a pass
// needs Python only for nodes and hooks written in it. The RPC layer accepts operators of the
// namespace `aten` alone. So ours is there, under a name that nobody will take for one of torch's.
void post(WorkerId to, Notice notice, double timeout, Acknowledge done = nullptr);

// Return a worker's name for errors; its number if the name is not known any more.
std::string worker_name(WorkerId id);

} // namespace dataparallel
