#include "context.h"

#include <torch/csrc/autograd/grad_mode.h>

#include "border.h"
#include "pass.h"

namespace dataparallel {

using torch::autograd::AccumulateGrad;
using torch::autograd::edge_list;

// --- what is recorded

std::optional<std::pair<MessageId, std::vector<int64_t>>> Context::send(
    const std::vector<at::Tensor>& tensors,
    WorkerId to) {
  MessageId message = -1;
  NodePointer node;
  std::vector<Runs> origins(tensors.size());
  if (!tensors.empty()) {
    message = worker_->next_number(tensors.size());
    node = make_node<Send>(tensors);
    for (size_t index = 0; receives_ && index < tensors.size(); ++index) {
      origins[index] = to_runs(reached({node->next_edge(index)}, id_));
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (released_) {
      return std::nullopt;
    }
    peers_.insert(to);
    if (node) {
      sends_.emplace(message, std::move(node));
    }
  }
  for (size_t index = 0; index < tensors.size(); ++index) {
    knowledge_.add(message + index, std::move(origins[index]), worker_->id());
  }
  return std::make_pair(message, knowledge_.news(to));
}

void Context::receive(MessageId message, const std::vector<at::Tensor>& tensors) {
  receives_ = true;
  NodePointer node = make_node<Receive>(id_, message);
  for (const auto& tensor : tensors) {
    const auto number = node->add_input_metadata(tensor);
    torch::autograd::impl::set_gradient_edge(tensor, {node, number});
  }
}

std::unordered_map<MessageId, NodePointer> Context::sends(const std::vector<PartId>& live) const {
  std::unordered_map<MessageId, NodePointer> sends;
  std::unordered_map<MessageId, std::vector<bool>> parts;
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
    auto& chosen = parts[entry->first];
    chosen.resize(entry->second->num_inputs());
    chosen[part - entry->first] = true;
  }
  for (const auto& [message, chosen] : parts) {
    sends.emplace(message, make_node<Send>(static_cast<const Send&>(*sends_.at(message)), chosen));
  }
  return sends;
}

std::vector<PartId> Context::reached_by(const std::vector<at::Tensor>& roots) const {
  edge_list edges;
  for (const auto& root : roots) {
    edges.push_back(torch::autograd::impl::gradient_edge(root));
  }
  return receives_ ? reached(edges, id_) : std::vector<PartId>();
}

// --- passes

std::shared_ptr<Pass> Context::start(
    const std::vector<at::Tensor>& roots,
    const std::vector<PartId>& live,
    bool retain_graph,
    double timeout) {
  return begin(
      Description{worker_->next_number(), retain_graph, timeout, live}.to_numbers(), roots);
}

std::shared_ptr<Pass> Context::begin(
    const std::vector<int64_t>& description,
    const std::vector<at::Tensor>& roots) {
  // The lock is held while the pass is prepared: another delivery may be for it, too.
  std::lock_guard<std::mutex> lock(passes_mutex_);
  const PassId id = description.at(0);
  if (ended_.count(id)) {
    return nullptr;
  }
  if (const auto found = passes_.find(id); found != passes_.end()) {
    return found->second;
  }
  TORCH_CHECK(!released_, "the distributed autograd context ", id_, " has ended");
  auto pass =
      std::make_shared<Pass>(shared_from_this(), Description::from_numbers(description));
  try {
    pass->start(roots);
  } catch (...) {
    ended_.insert(id);
    throw;
  }
  passes_.emplace(id, pass);
  return pass;
}

void Context::take(Notice notice) {
  std::shared_ptr<Pass> pass;
  if (notice.kind == Kind::kGradients) {
    pass = begin(notice.description, {});
  } else {
    std::lock_guard<std::mutex> lock(passes_mutex_);
    if (const auto found = passes_.find(notice.pass); found != passes_.end()) {
      pass = found->second;
    } else if (notice.kind == Kind::kCancelled) {
      ended_.insert(notice.pass);
    }
  }
  if (pass) {
    pass->take(std::move(notice));
  }
}

void Context::erase(PassId id) {
  std::shared_ptr<Pass> pass;
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

// --- gradients

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
  // Passes may use different streams, so each sum waits for the one before it.
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
  // The old gradient is freed after the lock is released: tensors may want the interpreter.
  Leaf leaf{variable, std::move(gradient), std::nullopt};
  std::lock_guard<std::mutex> lock(gradients_mutex_);
  auto& place = leaves_[variable.unsafeGetTensorImpl()];
  std::swap(place, leaf);
  if (place.gradient.defined()) {
    place.mark();
  } else {
    leaves_.erase(variable.unsafeGetTensorImpl());
  }
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
  // These are freed after the locks are released: nodes and tensors may want the interpreter.
  decltype(sends_) sends;
  decltype(leaves_) leaves;
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
    passes.swap(passes_);
  }
  for (const auto& entry : passes) {
    entry.second->fail("the distributed autograd context was released");
  }
  {
    std::lock_guard<std::mutex> lock(gradients_mutex_);
    leaves.swap(leaves_);
  }
  others.merge(knowledge_.senders());
  others.erase(worker_->id());
  return others;
}

// --- workers

namespace {

// The number of ended contexts that a worker remembers.
constexpr size_t kRemembered = 4096;
// Seconds that a notice of a context's end may take by default.
constexpr double kTelling = 60;
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

std::shared_ptr<Context> Worker::forget(ContextId id) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (released_.insert(id).second) {
    released_order_.push_back(id);
  }
  if (released_order_.size() > kRemembered) {
    released_.erase(released_order_.front());
    released_order_.pop_front();
  }
  auto entry = contexts_.extract(id);
  return entry ? std::move(entry.mapped()) : nullptr;
}

void Worker::release(ContextId id, double timeout, WorkerId told_by) {
  const auto context = forget(id);
  if (!context) {
    return;
  }
  for (const auto peer : context->release()) {
    if (peer != told_by) {
      post(peer, {Kind::kReleased, id_, id}, timeout);
    }
  }
}

void Worker::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  for (const auto& context : contexts()) {
    forget(context->id());
    context->release();
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

void Worker::take(Notice notice) {
  if (notice.kind == Kind::kReleased) {
    release(notice.context, kTelling, notice.sender);
    return;
  }
  const auto context = find(notice.context);
  TORCH_CHECK(
      context || notice.kind != Kind::kGradients, "worker '", name_,
      "' has no distributed autograd context ", notice.context, ": it has ended");
  if (context) {
    context->take(std::move(notice));
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
      {"num_autograd_contexts", static_cast<int64_t>(open.size())}};
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
