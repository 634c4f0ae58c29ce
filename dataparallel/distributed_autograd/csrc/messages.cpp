#include "messages.h"

#include <unordered_set>

#include <torch/csrc/distributed/rpc/rpc_agent.h>
#include <torch/csrc/distributed/rpc/script_call.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/library.h>

#include "context.h"
#include "pass.h"

namespace dataparallel {

namespace rpc = torch::distributed::rpc;

namespace {

// The numbers of a notice: this many, then a flag for each gradient, then the description.
constexpr size_t kHead = 7;

// A gradient may be undefined, so each has a flag, and only a defined one has a tensor.
int64_t take_notice(
    std::vector<int64_t> numbers,
    std::vector<at::Tensor> defined,
    std::string text) {
  TORCH_CHECK(
      numbers.size() >= kHead && numbers[5] >= 0 && numbers.size() - kHead >= size_t(numbers[5]),
      "damaged notice of a worker");
  Notice notice{static_cast<Kind>(numbers[0]), numbers[1], numbers[2], numbers[3], std::move(text)};
  notice.message = numbers[4];
  notice.finished = numbers[6] != 0;
  const auto flags = numbers.begin() + kHead;
  const auto end = flags + numbers[5];
  // Gradients that shared memory still share it here, and two leaves must not have one gradient.
  std::unordered_set<c10::StorageImpl*> memories;
  size_t next = 0;
  for (auto flag = flags; flag != end; ++flag) {
    at::Tensor gradient;
    if (*flag != 0) {
      gradient = std::move(defined.at(next++));
      if (gradient.has_storage() &&
          !memories.insert(gradient.storage().unsafeGetStorageImpl()).second) {
        gradient = gradient.clone();
      }
    }
    notice.gradients.push_back(std::move(gradient));
  }
  notice.description.assign(end, numbers.end());
  process_worker()->take(std::move(notice));
  return 0;
}

// The RPC layer sends a tensor from a device only if it has a device map for it.
at::Tensor fit_to_travel(const at::Tensor& tensor, const rpc::WorkerInfo& to) {
  if (tensor.is_cpu() ||
      (tensor.is_cuda() &&
       rpc::RpcAgent::getCurrentRpcAgent()->getDeviceMap(to).count(tensor.device()))) {
    return tensor;
  }
  return tensor.to(at::kCPU);
}

const std::shared_ptr<torch::jit::Operator>& notice_operator() {
  static const auto found =
      torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString("aten::_dataparallel_notice"));
  return found.at(0);
}

void send(WorkerId to, Notice notice, double timeout, const Acknowledge& done) {
  const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
  const auto& info = agent->getWorkerInfo(static_cast<rpc::worker_id_t>(to));
  std::vector<int64_t> numbers{
      static_cast<int64_t>(notice.kind), notice.sender, notice.context, notice.pass,
      notice.message, static_cast<int64_t>(notice.gradients.size()), notice.finished};
  std::vector<at::Tensor> defined;
  for (const auto& gradient : notice.gradients) {
    numbers.push_back(gradient.defined());
    if (gradient.defined()) {
      defined.push_back(fit_to_travel(gradient, info));
    }
  }
  numbers.insert(numbers.end(), notice.description.begin(), notice.description.end());
  std::vector<at::IValue> arguments{
      std::move(numbers), std::move(defined), std::move(notice.text)};
  auto message = rpc::ScriptCall(notice_operator(), std::move(arguments)).toMessage();
  auto answer = agent->send(info, std::move(message), static_cast<float>(timeout));
  answer->addCallback([done](c10::ivalue::Future& future) {
    done(future.hasError() ? future.tryRetrieveErrorMessage() : std::string());
  });
}

} // namespace

std::string worker_name(WorkerId id) {
  if (!rpc::RpcAgent::isCurrentRpcAgentSet()) {
    return std::to_string(id);
  }
  const auto agent = rpc::RpcAgent::getCurrentRpcAgent();
  return agent->getWorkerInfo(static_cast<rpc::worker_id_t>(id)).name_;
}

void post(WorkerId to, Notice notice, double timeout, Acknowledge done) {
  if (!done) {
    // If the other side is gone, nobody is left to tell; others who wait for it find out
    // themselves.
    done = [](const std::string&) {};
  }
  std::string error;
  try {
    send(to, std::move(notice), timeout, done);
    return;
  } catch (...) {
    error = describe(std::current_exception());
  }
  done(error.empty() ? std::string("unknown error") : error);
}

} // namespace dataparallel

TORCH_LIBRARY_FRAGMENT(aten, library) {
  library.def(
      "_dataparallel_notice(int[] numbers, Tensor[] gradients, str text) -> int",
      &dataparallel::take_notice);
}
