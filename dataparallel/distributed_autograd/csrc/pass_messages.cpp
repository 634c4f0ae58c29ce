// What a pass sends to other workers and takes from them.
#include "pass.h"
#include "streams.h"
#include "worker.h"

namespace dataparallel {

using torch::autograd::InputBuffer;
using torch::autograd::Node;
using torch::autograd::NodeTask;

double Pass::patience() const {
  // Longer than the root's, which names all that have not finished and not only one.
  constexpr double kMore = 2;
  return description_.timeout > 0 ? description_.timeout + kMore : 0;
}

void Pass::take(Delivery delivery) {
  const auto message = delivery.message;
  auto& gradients = delivery.gradients;
  NodePointer node;
  Task task;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_) {
      return;
    }
    const auto found = awaited_.find(message);
    TORCH_CHECK(
        found != awaited_.end(), "worker '", context_->worker().name(),
        "' does not await gradients for message ", message);
    TORCH_CHECK(arrived_.insert(message).second, "gradients for message ", message, " came twice");
    if (!is_root()) {
      finished_.insert(finished_.end(), delivery.finished.begin(), delivery.finished.end());
      delivery.finished.clear();
    }
    node = found->second;
    task = task_;
  }
  TORCH_CHECK(
      gradients.size() == node->num_inputs(), "message ", message, " had ", node->num_inputs(),
      " tensors that require grad, and ", gradients.size(), " gradients arrived for it");
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
  settle(delivery.finished);
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
  Delivery delivery{worker.id(), context_->id(), id(), message, std::move(gradients), {}, {}};
  if (to == worker.id()) {
    context_->take(std::move(delivery));
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (told_.insert(to).second) {
      delivery.description = description_.to_numbers();
    }
  }
  if (!is_root() && ends_with(receive)) {
    std::lock_guard<std::mutex> lock(mutex_);
    finished_.push_back(worker.id());
    delivery.finished.swap(finished_);
    handed_over_ = true;
  }
  worker.message_left();
  auto done = [pass = shared_from_this(), to](const std::string& error) {
    auto& worker = pass->context_->worker();
    worker.message_arrived();
    if (!error.empty()) {
      pass->fail(
          "worker '" + worker.name() + "' could not hand gradients to worker '" +
              worker.link().name(to) + "': " + error,
          to);
    }
  };
  worker.link().deliver(to, std::move(delivery), patience(), std::move(done));
}

bool Pass::ends_with(const Node& leaf) {
  Task task;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    task = task_;
  }
  if (!task || task->outstanding_tasks_ != 1 || !leaf.post_hooks().empty()) {
    return false;
  }
  std::lock_guard<std::mutex> lock(task->final_callbacks_lock_);
  return task->final_callbacks_.empty();
}

void Pass::take(const Notification& notification) {
  if (notification.notice == Notice::kCancelled) {
    fail(notification.text);
    return;
  }
  if (notification.notice == Notice::kFailed) {
    fail(notification.text, notification.sender);
  }
  settle(notification.finished);
}

void Pass::send(
    WorkerId to,
    Notice notice,
    const std::string& text,
    std::vector<WorkerId> finished) {
  auto& worker = context_->worker();
  worker.message_left();
  auto done = [owner = worker.shared_from_this()](const std::string&) {
    // Where the other side is gone there is nobody to tell; the root finds that out by itself.
    owner->message_arrived();
  };
  worker.link().notify(
      to,
      {worker.id(), context_->id(), id(), notice, text, std::move(finished)},
      patience(),
      std::move(done));
}

} // namespace dataparallel
