// What travels between workers during and after a backward pass, through torch.distributed.rpc.
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

// Contexts, messages and passes are numbered by the worker that makes them, which stands in the
// upper bits: numbers of two workers never collide, and a message tells who sent it.
constexpr int kCounterBits = 47;
inline WorkerId maker(int64_t number) {
  return number >> kCounterBits;
}

enum class Kind : int64_t { kGradients, kFinished, kFailed, kCancelled, kReleased };

// What one worker tells another about a pass, or about a context.
struct Notice {
  Kind kind;
  WorkerId sender;
  ContextId context;
  PassId pass = 0;
  // Why a pass has failed or was cancelled.
  std::string text = {};
  // The gradients of one message, on their way back to its sender.
  MessageId message = 0;
  std::vector<at::Tensor> gradients = {};
  // With gradients: what their receiver must know to take part in the pass.
  std::vector<int64_t> description = {};
  // With gradients: they are the last that their sender had to do in the pass.
  bool finished = false;
};

// Called with an empty text once the other side has taken a notice, else with the error.
using Acknowledge = std::function<void(const std::string&)>;

// Note [Notices as calls of an operator]
// torch's RPC takes a call of a registered operator in without Python: the receiving process runs
// it in a thread of its pool and never asks for the interpreter. So notices are calls of an
// operator, and a pass needs Python only for nodes and hooks written in it. The RPC layer accepts
// operators of the namespace `aten` alone, which is why ours is there, under a name that nobody
// will take for torch's.
void post(WorkerId to, Notice notice, double timeout, Acknowledge done = nullptr);

// For errors: the number, where the name is not known any more.
std::string worker_name(WorkerId id);

} // namespace dataparallel
