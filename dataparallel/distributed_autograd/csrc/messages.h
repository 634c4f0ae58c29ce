// What travels between workers during and after a backward pass, through torch.distributed.rpc.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace dataparallel {

class Worker;

using WorkerId = int64_t;
using ContextId = int64_t;
using MessageId = int64_t;
// One tensor of a message: the message's number and the tensor's place in it, added up.
using PartId = int64_t;
using PassId = int64_t;

// Contexts, messages and passes are numbered by the worker that makes them, which stands in the
// upper bits: numbers of two workers never collide, and a message tells who sent it.
constexpr int kCounterBits = 47;
// Marks numbers that stand for several parts; see Note [Items].
constexpr int64_t kJoint = int64_t{1} << (kCounterBits - 1);
inline WorkerId maker(int64_t number) {
  return number >> kCounterBits;
}

// The gradients of one message, on their way back to its sender.
struct Delivery {
  WorkerId sender;
  ContextId context;
  PassId pass;
  MessageId message;
  std::vector<at::Tensor> gradients;
  // Workers that have nothing left to do in this pass, on the way to the root.
  std::vector<WorkerId> finished;
  // What the receiver must know to take part in the pass; empty where it was told before.
  std::vector<int64_t> description;
};

enum class Notice : int64_t { kFinished = 0, kFailed = 1, kCancelled = 2, kReleased = 3, kAlive = 4 };

struct Notification {
  WorkerId sender;
  ContextId context;
  PassId pass;
  Notice notice;
  std::string text;
  std::vector<WorkerId> finished;
};

// Called with an empty text once the other side has taken a message, else with the error.
using Acknowledge = std::function<void(const std::string&)>;

// Note [Gradients as calls of operators]
// torch's RPC takes a call of a registered operator in without Python: the receiving process runs
// it in a thread of its pool and never asks for the interpreter. So the messages of a backward
// pass are operators, and a pass needs Python only for nodes and hooks written in it. The RPC
// layer accepts operators of the namespace `aten` alone, which is why ours are there, under names
// that nobody will take for torch's.
void deliver(WorkerId to, Delivery delivery, double timeout, Acknowledge done);
void notify(WorkerId to, Notification notification, double timeout, Acknowledge done);
// For errors: the number, where the name is not known any more.
std::string worker_name(WorkerId id);

} // namespace dataparallel
