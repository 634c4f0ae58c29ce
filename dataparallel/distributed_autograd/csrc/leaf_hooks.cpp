#include "border.h"
#include "context.h"
#include "pass.h"

// Note [Gradients of leaves]
// In a distributed backward pass gradients belong to the context, never to `.grad`. Each
// AccumulateGrad node that a pass will reach gets a pair of hooks, once, which do nothing in an
// ordinary backward. The first, after the leaf's own pre hooks (that were there when a pass first
// reached it: the list may not change while it is in use), adds the gradient to the context
// and returns an undefined one, for which the node leaves `.grad` alone but still calls the
// leaf's post-accumulate hook. That hook is written for `.grad`, so while it runs, and only if
// there is one, `.grad` is the gradient in the context; the second hook then puts back what was there.
namespace dataparallel {

using torch::autograd::AccumulateGrad;
using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::variable_list;

namespace {

// The leaves whose `.grad` shows the gradient of a context just now. Two passes over one leaf
// take turns.
std::mutex lending;
std::condition_variable returned;
std::unordered_set<at::TensorImpl*> lent_leaves;
// How often a pass that waits for one looks whether it failed meanwhile.
constexpr auto kLook = std::chrono::milliseconds(200);

class ToContext : public FunctionPreHook {
 public:
  explicit ToContext(AccumulateGrad& leaf) : leaf_(leaf) {}

  variable_list operator()(const variable_list& gradients) override {
    auto pass = Pass::current();
    if (!pass) {
      return gradients;
    }
    if (pass->lend_again(leaf_.variable)) {
      // The leaf's hook runs a backward of its own, for which `.grad` is the context's already.
      return gradients;
    }
    if (gradients.at(0).defined()) {
      pass->context()->accumulate(leaf_.variable, gradients[0]);
    }
    if (leaf_.tensor_post_acc_grad_hooks()) {
      pass->lend(leaf_.variable);
    }
    return variable_list(gradients.size());
  }

  // Nothing to compile: in a compiled backward there is no pass.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  // The hook is a part of the node, so the node is there.
  AccumulateGrad& leaf_;
};

class FromHook : public FunctionPostHook {
 public:
  explicit FromHook(AccumulateGrad& leaf) : leaf_(leaf) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (auto pass = Pass::current()) {
      pass->take_back(leaf_.variable);
    }
    return outputs;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  AccumulateGrad& leaf_;
};

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

void collect_in_contexts(AccumulateGrad& leaf) {
  // Two passes may reach one leaf.
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& hook : leaf.pre_hooks()) {
    if (dynamic_cast<ToContext*>(hook.get())) {
      return;
    }
  }
  leaf.add_pre_hook(std::make_unique<ToContext>(leaf));
  leaf.add_post_hook(std::make_unique<FromHook>(leaf));
}

} // namespace dataparallel
