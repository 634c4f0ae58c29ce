// The work that streams queue: operators and copies, over memory that they keep in existence.
#pragma once

#include "alias.h"
#include "operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace vdev {

// Return a tensor that a task may own: the CPU's alias of device memory, or the host's own memory.
// Python may never hold it: threads without the interpreter destroy tasks.
at::Tensor for_task(const at::Tensor& tensor);

class CopyTask final : public Task {
 public:
  CopyTask(std::string name, const at::Tensor& from, const at::Tensor& to)
      : name_(std::move(name)), from_(for_task(from)), to_(for_task(to)) {}
  void run() override;
  std::string name() const override {
    return name_;
  }

 private:
  std::string name_;
  at::Tensor from_;
  at::Tensor to_;
};

class OperatorTask final : public Task {
 public:
  OperatorTask(const c10::OperatorHandle& op, const std::string& name) : op_(op), name_(name) {}

  // Allocate a result as it was described; the kernel's result is copied there.
  c10::IValue expect(
      const std::vector<TensorDescription>& described, ReturnKind kind, c10::DeviceIndex device);
  void expect_nothing();
  void run() override;
  std::string name() const override {
    return name_;
  }
  // Operators of others may be collectives.
  bool may_block() const override {
    return name_.rfind("aten::", 0) != 0;
  }

  std::vector<c10::IValue> arguments;
  std::vector<at::Tensor> written;

 private:
  at::Tensor expect_tensor(const TensorDescription& described, c10::DeviceIndex device);
  void store(const c10::IValue& result, const std::vector<at::Tensor>& targets) const;
  void store_tensor(const at::Tensor& result, const at::Tensor& target) const;

  c10::OperatorHandle op_;
  const std::string& name_;
  std::vector<std::vector<at::Tensor>> targets_;
};

}  // namespace vdev
