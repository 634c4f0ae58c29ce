#include "context.h"

#include <algorithm>

#include <torch/csrc/autograd/grad_mode.h>

#include "border.h"
#include "pass.h"
#include "streams.h"
#include "worker.h"

namespace dataparallel {

using torch::autograd::AccumulateGrad;

Context::Context(std::shared_ptr<Worker> worker, ContextId id)
    : worker_(std::move(worker)), id_(id), reach_(id, *worker_) {}

MessageId Context::add_send(const std::vector<at::Tensor>& tensors) {
  const auto message = worker_->next_number(tensors.size());
  auto send = make_node<Send>(tensors);
  std::vector<PartId> items(tensors.size());
  if (receives_ > 0) {
    items = reach_.items(send->next_edges(), knowledge_);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (released_) {
      return -1;
    }
    sends_.emplace(message, std::move(send));
  }
  for (size_t index = 0; index < tensors.size(); ++index) {
    knowledge_.add(message + index, items[index] ? Runs{items[index], 1} : Runs(), worker_->id());
  }
  return message;
}

void Context::add_receive(MessageId message, const std::vector<at::Tensor>& tensors) {
  ++receives_;
  NodePointer receive = make_node<Receive>(id_, message);
  for (const auto& tensor : tensors) {
    const auto number = receive->add_input_metadata(tensor);
    torch::autograd::impl::set_gradient_edge(tensor, {receive, number});
  }
}

bool Context::meet(WorkerId peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!released_) {
    peers_.insert(peer);
  }
  return !released_;
}

std::unordered_map<MessageId, NodePointer> Context::sends(const std::vector<PartId>& live) const {
  struct Found {
    NodePointer node;
    std::vector<bool> live;
  };
  std::unordered_map<MessageId, Found> found;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto part : live) {
      if (maker(part) != worker_->id()) {
        continue;
      }
      auto entry = sends_.upper_bound(part);
      TORCH_CHECK(
          entry != sends_.begin() &&
              part < std::prev(entry)->first + std::prev(entry)->second->num_inputs(),
          "worker '", worker_->name(), "' has not sent message ", part, " in context ", id_);
      --entry;
      auto& send = found[entry->first];
      send.node = entry->second;
      send.live.resize(send.node->num_inputs());
      send.live[part - entry->first] = true;
    }
  }
  std::unordered_map<MessageId, NodePointer> sends;
  for (auto& [message, send] : found) {
    const bool whole = std::find(send.live.begin(), send.live.end(), false) == send.live.end();
    sends.emplace(
        message,
        whole ? send.node
              : NodePointer(make_node<Send>(static_cast<const Send&>(*send.node), send.live)));
  }
  return sends;
}

std::vector<PartId> Context::reached_by(const std::vector<at::Tensor>& roots) const {
  if (receives_ == 0) {
    return {};
  }
  torch::autograd::edge_list edges;
  for (const auto& root : roots) {
    edges.push_back(torch::autograd::impl::gradient_edge(root));
  }
  return reach_.reached(edges);
}

std::shared_ptr<Pass> Context::start(
    const std::vector<at::Tensor>& roots,
    const std::vector<PartId>& live,
    bool retain_graph,
    double timeout) {
  const Description description{worker_->next_number(), retain_graph, timeout, live};
  return begin(description.to_numbers(), roots);
}

std::shared_ptr<Pass> Context::begin(
    const std::vector<int64_t>& numbers,
    const std::vector<at::Tensor>& roots) {
  const auto description = Description::from_numbers(numbers);
  const auto id = description.pass;
  std::shared_ptr<Pass> pass;
  std::vector<Delivery> early;
  {
    std::lock_guard<std::mutex> preparing(beginning_);
    {
      std::lock_guard<std::mutex> lock(passes_mutex_);
      if (passes_.count(id) || ended_.count(id)) {
        return passes_.count(id) ? passes_.at(id) : nullptr;
      }
    }
    pass = std::make_shared<Pass>(shared_from_this(), description);
    {
      // Before it starts: it may be over at once. What is here when the context ends is failed.
      std::lock_guard<std::mutex> lock(passes_mutex_);
      TORCH_CHECK(!released_, "the distributed autograd context ", id_, " has ended");
      passes_.emplace(id, pass);
    }
    try {
      pass->start(roots);
    } catch (...) {
      erase(id);
      throw;
    }
    std::lock_guard<std::mutex> lock(passes_mutex_);
    early = std::move(early_[id]);
    early_.erase(id);
  }
  for (auto& delivery : early) {
    pass->take(std::move(delivery));
  }
  return pass;
}

void Context::take(Delivery delivery) {
  std::shared_ptr<Pass> pass;
  if (!delivery.description.empty()) {
    pass = begin(delivery.description, {});
  } else {
    // Prepared, or not yet known: what overtook the description waits for it.
    std::lock_guard<std::mutex> preparing(beginning_);
    std::lock_guard<std::mutex> lock(passes_mutex_);
    if (const auto found = passes_.find(delivery.pass); found != passes_.end()) {
      pass = found->second;
    } else if (!ended_.count(delivery.pass)) {
      early_[delivery.pass].push_back(std::move(delivery));
      return;
    }
  }
  if (pass) {
    pass->take(std::move(delivery));
  }
}

void Context::take(const Notification& notification) {
  std::shared_ptr<Pass> pass;
  std::vector<Delivery> dropped;
  {
    std::lock_guard<std::mutex> lock(passes_mutex_);
    if (const auto found = passes_.find(notification.pass); found != passes_.end()) {
      pass = found->second;
    } else if (notification.notice == Notice::kCancelled) {
      ended_.insert(notification.pass);
      dropped = std::move(early_[notification.pass]);
      early_.erase(notification.pass);
    }
  }
  if (pass) {
    pass->take(notification);
  }
}

void Context::erase(PassId id) {
  std::shared_ptr<Pass> pass;
  std::vector<Delivery> dropped;
  std::lock_guard<std::mutex> lock(passes_mutex_);
  if (const auto found = passes_.find(id); found != passes_.end()) {
    pass = std::move(found->second);
    passes_.erase(found);
  }
  ended_.insert(id);
}

std::vector<std::shared_ptr<Pass>> Context::passes() const {
  std::vector<std::shared_ptr<Pass>> passes;
  std::lock_guard<std::mutex> lock(passes_mutex_);
  for (const auto& entry : passes_) {
    passes.push_back(entry.second);
  }
  return passes;
}

void Context::Leaf::wait() const {
  if (ready) {
    current_stream(gradient.device())->wait(*ready);
  }
}

void Context::Leaf::mark() {
  if (const auto stream = current_stream(gradient.device())) {
    ready.emplace(stream->device_type());
    ready->record(*stream);
  }
}

void Context::accumulate(const at::Tensor& variable, const at::Tensor& gradient) {
  const torch::autograd::AutoGradMode no_grad(false);
  std::lock_guard<std::mutex> lock(gradients_mutex_);
  auto& leaf = leaves_[variable.unsafeGetTensorImpl()];
  leaf.variable = variable;
  const auto update = [&](at::Tensor&& made) { leaf.gradient = std::move(made); };
  // Passes and their streams differ; each sum follows the one before it.
  leaf.wait();
  AccumulateGrad::accumulateGrad(variable, leaf.gradient, gradient, 1, update);
  leaf.mark();
}

at::Tensor Context::gradient(const at::Tensor& variable) const {
  std::lock_guard<std::mutex> lock(gradients_mutex_);
  const auto found = leaves_.find(variable.unsafeGetTensorImpl());
  if (found == leaves_.end()) {
    return {};
  }
  found->second.wait();
  return found->second.gradient;
}

void Context::set_gradient(const at::Tensor& variable, at::Tensor gradient) {
  Leaf before;
  std::lock_guard<std::mutex> lock(gradients_mutex_);
  auto* key = variable.unsafeGetTensorImpl();
  if (const auto found = leaves_.find(key); found != leaves_.end()) {
    before = std::move(found->second);
    leaves_.erase(found);
  }
  if (!gradient.defined()) {
    return;
  }
  Leaf leaf{variable, std::move(gradient), std::nullopt};
  leaf.mark();
  leaves_.emplace(key, std::move(leaf));
}

std::vector<std::pair<at::Tensor, at::Tensor>> Context::gradients() const {
  std::vector<std::pair<at::Tensor, at::Tensor>> all;
  std::lock_guard<std::mutex> lock(gradients_mutex_);
  for (const auto& entry : leaves_) {
    const auto& leaf = entry.second;
    leaf.wait();
    all.emplace_back(leaf.variable, leaf.gradient);
  }
  return all;
}

std::unordered_set<WorkerId> Context::release() {
  // Dropped after the locks are: nodes and tensors may want the interpreter.
  decltype(sends_) sends;
  decltype(leaves_) leaves;
  decltype(early_) early;
  decltype(passes_) passes;
  std::unordered_set<WorkerId> others;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    sends.swap(sends_);
    others = peers_;
  }
  {
    std::lock_guard<std::mutex> lock(passes_mutex_);
    early.swap(early_);
    passes.swap(passes_);
  }
  for (const auto& entry : passes) {
    entry.second->fail("the distributed autograd context was released");
  }
  {
    std::lock_guard<std::mutex> lock(gradients_mutex_);
    leaves.swap(leaves_);
  }
  reach_.clear();
  others.merge(knowledge_.senders());
  others.erase(worker_->id());
  return others;
}

} // namespace dataparallel
