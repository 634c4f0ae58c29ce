#include "messages.h"

#include <unordered_set>

#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/library.h>

#include "pass.h"
#include "worker.h"

namespace dataparallel {

namespace rpc = torch::distributed::rpc;

namespace {

// Plain lists of one type are what the RPC layer reads fast, so all numbers of a message go into
// one list, each part of it after its length. A gradient that is undefined, which is legal, is left
// out: `present` has the places of the others.
struct Numbers {
  std::vector<int64_t> all;
  size_t at = 0;

  void put(const std::vector<int64_t>& part) {
    all.push_back(static_cast<int64_t>(part.size()));
    all.insert(all.end(), part.begin(), part.end());
  }
  int64_t take() {
    TORCH_CHECK(at < all.size(), "damaged message of a backward pass");
    return all[at++];
  }
  std::vector<int64_t> take_part() {
    const auto size = static_cast<size_t>(take());
    TORCH_CHECK(size <= all.size() - at, "damaged message of a backward pass");
    std::vector<int64_t> part(all.begin() + at, all.begin() + at + size);
    at += size;
    return part;
  }
};

int64_t deliver_operator(std::vector<int64_t> all, std::vector<at::Tensor> gradients) {
  Numbers numbers{std::move(all)};
  Delivery delivery;
  delivery.sender = numbers.take();
  delivery.context = numbers.take();
  delivery.pass = numbers.take();
  delivery.message = numbers.take();
  delivery.gradients.resize(numbers.take());
  const auto present = numbers.take_part();
  delivery.finished = numbers.take_part();
  delivery.description = numbers.take_part();
  TORCH_CHECK(present.size() == gradients.size(), "damaged message of a backward pass");
  // Gradients of one memory arrive as such, and two leaves must not share one.
  std::unordered_set<c10::StorageImpl*> memories;
  for (size_t index = 0; index < gradients.size(); ++index) {
    auto& gradient = gradients[index];
    if (gradient.has_storage() &&
        !memories.insert(gradient.storage().unsafeGetStorageImpl()).second) {
      gradient = gradient.clone();
    }
    delivery.gradients.at(present[index]) = std::move(gradient);
  }
  process_worker()->take(std::move(delivery));
  return 0;
}

int64_t notify_operator(std::vector<int64_t> all, std::string text) {
  Numbers numbers{std::move(all)};
  Notification notification;
  notification.sender = numbers.take();
  notification.context = numbers.take();
  notification.pass = numbers.take();
  notification.notice = static_cast<Notice>(numbers.take());
  notification.finished = numbers.take_part();
  notification.text = std::move(text);
  process_worker()->take(notification);
  return 0;
}

// The RPC layer sends a tensor from a device only if it has a device map for it.
at::Tensor fit_to_travel(const at::Tensor& tensor, WorkerId to) {
  if (tensor.is_cpu()) {
    return tensor;
  }
  const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
  const auto& info = agent->getWorkerInfo(static_cast<rpc::worker_id_t>(to));
  if (tensor.is_cuda() && agent->getDeviceMap(info).count(tensor.device())) {
    return tensor;
  }
  return tensor.to(at::kCPU);
}

using Operator = std::shared_ptr<torch::jit::Operator>;

Operator find_operator(const char* name) {
  const auto found = torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name));
  TORCH_CHECK(found.size() == 1, "operator ", name, " is not registered");
  return found[0];
}

void call(
    WorkerId to,
    const Operator& function,
    std::vector<at::IValue> arguments,
    double timeout,
    Acknowledge done) {
  std::string error;
  try {
    const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
    const auto& info = agent->getWorkerInfo(static_cast<rpc::worker_id_t>(to));
    auto message = rpc::ScriptCall(function, std::move(arguments)).toMessage();
    auto answer = agent->send(info, std::move(message), static_cast<float>(timeout));
    answer->addCallback([done = std::move(done)](c10::ivalue::Future& future) {
      done(future.hasError() ? future.tryRetrieveErrorMessage() : std::string());
    });
    return;
  } catch (...) {
    error = describe(std::current_exception());
  }
  done(error.empty() ? std::string("unknown error") : error);
}

} // namespace

std::string worker_name(WorkerId id) {
  if (!rpc::RpcAgent::isCurrentRpcAgentSet()) {
    return std::to_string(id);
  }
  const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
  return agent->getWorkerInfo(static_cast<rpc::worker_id_t>(id)).name_;
}

void deliver(WorkerId to, Delivery delivery, double timeout, Acknowledge done) {
  std::vector<at::Tensor> gradients;
  std::vector<int64_t> present;
  for (size_t index = 0; index < delivery.gradients.size(); ++index) {
    if (auto& gradient = delivery.gradients[index]; gradient.defined()) {
      gradients.push_back(fit_to_travel(gradient, to));
      present.push_back(static_cast<int64_t>(index));
    }
  }
  Numbers numbers{
      {delivery.sender, delivery.context, delivery.pass, delivery.message,
       static_cast<int64_t>(delivery.gradients.size())}};
  numbers.put(present);
  numbers.put(delivery.finished);
  numbers.put(delivery.description);
  static const auto function = find_operator("aten::_dataparallel_deliver");
  call(
      to,
      function,
      {std::move(numbers.all), std::move(gradients)},
      timeout,
      std::move(done));
}

void notify(WorkerId to, Notification notification, double timeout, Acknowledge done) {
  Numbers numbers{
      {notification.sender, notification.context, notification.pass,
       static_cast<int64_t>(notification.notice)}};
  numbers.put(notification.finished);
  static const auto function = find_operator("aten::_dataparallel_notify");
  call(
      to,
      function,
      {std::move(numbers.all), std::move(notification.text)},
      timeout,
      std::move(done));
}

} // namespace dataparallel

TORCH_LIBRARY_FRAGMENT(aten, library) {
  library.def(
      "_dataparallel_deliver(int[] numbers, Tensor[] gradients) -> int",
      &dataparallel::deliver_operator);
  library.def(
      "_dataparallel_notify(int[] numbers, str text) -> int", &dataparallel::notify_operator);
}
