#include "worker.h"

#include <algorithm>

#include "pass.h"

namespace dataparallel {

namespace {
constexpr size_t kRemembered = 4096;
// One counter for the process, so that a worker made anew does not repeat numbers.
std::atomic<int64_t> counter{0};

std::mutex process_worker_mutex;
std::shared_ptr<Worker> of_process;
} // namespace

std::shared_ptr<Worker> process_worker() {
  std::lock_guard<std::mutex> lock(process_worker_mutex);
  TORCH_CHECK(
      of_process,
      "this process takes no part in distributed autograd: it has not imported "
      "dataparallel.distributed_autograd, or its RPC was shut down");
  return of_process;
}

void set_process_worker(std::shared_ptr<Worker> worker) {
  {
    std::lock_guard<std::mutex> lock(process_worker_mutex);
    of_process.swap(worker);
  }
  if (worker) {
    worker->close();
  }
}

int64_t Worker::next_number(int64_t count) {
  return (id_ << kCounterBits) | (counter.fetch_add(count) + 1);
}

std::shared_ptr<Context> Worker::new_context() {
  end_overdue_passes();
  auto context = obtain(next_number());
  TORCH_CHECK(context, "worker '", name_, "' is closed");
  return context;
}

std::shared_ptr<Context> Worker::obtain(ContextId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_ || released_.count(id)) {
    return nullptr;
  }
  auto& context = contexts_[id];
  if (!context) {
    context = std::make_shared<Context>(shared_from_this(), id);
  }
  return context;
}

std::shared_ptr<Context> Worker::find(ContextId id) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = contexts_.find(id);
  return found == contexts_.end() ? nullptr : found->second;
}

bool Worker::forget(ContextId id, std::shared_ptr<Context>& context) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!released_.insert(id).second) {
    return false;
  }
  released_order_.push_back(id);
  if (released_order_.size() > kRemembered) {
    released_.erase(released_order_.front());
    released_order_.pop_front();
  }
  if (const auto found = contexts_.find(id); found != contexts_.end()) {
    context = std::move(found->second);
    contexts_.erase(found);
  }
  return true;
}

void Worker::release(ContextId id, double timeout, WorkerId told_by) {
  std::shared_ptr<Context> context;
  if (!forget(id, context) || !context) {
    return;
  }
  for (const auto peer : context->release()) {
    if (peer != told_by) {
      tell_released(id, peer, timeout);
    }
  }
}

void Worker::tell_released(ContextId id, WorkerId peer, double timeout) {
  message_left();
  auto done = [owner = shared_from_this()](const std::string&) {
    // A worker that is gone holds nothing any more.
    owner->message_arrived();
  };
  notify(peer, {id_, id, 0, Notice::kReleased, "", {}}, timeout, std::move(done));
}

void Worker::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  for (const auto& open : contexts()) {
    std::shared_ptr<Context> context;
    forget(open->id(), context);
    open->release();
  }
}

std::vector<std::shared_ptr<Context>> Worker::contexts() const {
  std::vector<std::shared_ptr<Context>> contexts;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& entry : contexts_) {
    contexts.push_back(entry.second);
  }
  return contexts;
}

void Worker::take(Delivery delivery) {
  auto context = find(delivery.context);
  TORCH_CHECK(
      context, "worker '", name_, "' has no distributed autograd context ", delivery.context,
      ": it has ended");
  context->take(std::move(delivery));
}

void Worker::take(const Notification& notification) {
  if (notification.notice == Notice::kReleased) {
    release(notification.context, 60, notification.sender);
    return;
  }
  if (notification.notice == Notice::kAlive) {
    return;
  }
  if (auto context = find(notification.context)) {
    context->take(notification);
  }
}

std::unordered_map<std::string, int64_t> Worker::debug_info() {
  end_overdue_passes();
  const auto open = contexts();
  int64_t passes = 0;
  for (const auto& context : open) {
    passes += static_cast<int64_t>(context->passes().size());
  }
  return {
      {"num_current_backward_passes", passes},
      {"num_autograd_contexts", static_cast<int64_t>(open.size())},
      {"num_outstanding_messages", outstanding_.load()}};
}

void Worker::end_overdue_passes() {
  for (const auto& context : contexts()) {
    for (const auto& pass : context->passes()) {
      if (pass->overdue()) {
        pass->fail("the backward pass did not end in time");
      }
    }
  }
}

} // namespace dataparallel
