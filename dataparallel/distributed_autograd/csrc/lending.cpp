#include "pass.h"

// See Note [Gradients of leaves].
namespace dataparallel {

namespace {

// The leaves whose `.grad` shows the gradient of a context just now. Two passes over one leaf
// take turns.
std::mutex lending;
std::condition_variable returned;
std::unordered_set<at::TensorImpl*> lent_leaves;
// How often a pass that waits for one looks whether it failed meanwhile.
constexpr auto kLook = std::chrono::milliseconds(200);

} // namespace

bool Pass::lend_again(const at::Tensor& variable) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = lent_.find(variable.unsafeGetTensorImpl());
  if (found == lent_.end()) {
    return false;
  }
  ++found->second.depth;
  return true;
}

void Pass::lend(const at::Tensor& variable) {
  auto* key = variable.unsafeGetTensorImpl();
  {
    std::unique_lock<std::mutex> lock(lending);
    while (!returned.wait_for(lock, kLook, [&] { return !lent_leaves.count(key); })) {
      TORCH_CHECK(!error(), "the backward pass failed while it waited for a leaf in use");
    }
    lent_leaves.insert(key);
  }
  auto before = variable.grad();
  auto shown = context_->gradient(variable);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lent_.emplace(key, Loan{variable, before, 1});
  }
  variable.mutable_grad() = shown;
}

void Pass::take_back(const at::Tensor& variable) {
  auto* key = variable.unsafeGetTensorImpl();
  Loan loan;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = lent_.find(key);
    if (found == lent_.end() || --found->second.depth > 0) {
      return;
    }
    loan = std::move(found->second);
    lent_.erase(found);
  }
  // The hook may have changed it, or dropped it as an optimizer in backward does.
  context_->set_gradient(variable, variable.grad());
  variable.mutable_grad() = loan.before;
  {
    std::lock_guard<std::mutex> lock(lending);
    lent_leaves.erase(key);
  }
  returned.notify_all();
}

} // namespace dataparallel
