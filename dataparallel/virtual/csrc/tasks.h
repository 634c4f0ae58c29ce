// What streams queue: operators and copies, with the memory that they will touch.
#pragma once

#include "alias.h"
#include "describe.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace vdev {

// One side of a copy: an alias of device memory with its block, or host memory.
class HostOrDevice {
 public:
  explicit HostOrDevice(const at::Tensor& tensor);
  at::Tensor tensor;

 private:
  BlockRef block_;
};

class CopyTask final : public Task {
 public:
  CopyTask(std::string name, HostOrDevice from, HostOrDevice to)
      : name_(std::move(name)), from_(std::move(from)), to_(std::move(to)) {}
  void run() override;
  std::string name() const override {
    return name_;
  }

 private:
  std::string name_;
  HostOrDevice from_;
  HostOrDevice to_;
};

class OperatorTask final : public Task {
 public:
  OperatorTask(const c10::OperatorHandle& op, const std::string& name) : op_(op), name_(name) {}

  void keep(const at::Tensor& tensor);
  // Allocates what a result was described as; the kernel's result is copied there.
  c10::IValue expect(
      const std::vector<TensorDescription>& described, ReturnKind kind, c10::DeviceIndex device);
  void expect_nothing();
  void run() override;
  std::string name() const override {
    return name_;
  }

  std::vector<c10::IValue> arguments;
  std::vector<at::Tensor> written;

 private:
  at::Tensor expect_tensor(const TensorDescription& described, c10::DeviceIndex device);
  void store(const c10::IValue& result, const std::vector<at::Tensor>& targets) const;
  void store_tensor(const at::Tensor& result, const at::Tensor& target) const;

  c10::OperatorHandle op_;
  const std::string& name_;
  std::vector<BlockRef> blocks_;
  std::vector<std::vector<at::Tensor>> targets_;
};

}  // namespace vdev
