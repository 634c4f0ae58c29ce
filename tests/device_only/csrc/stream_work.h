// A collective that was launched, as who waits for it sees it.
#pragma once

#include "communicator.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace device_only {

class StreamWork final : public c10d::Work {
 public:
  StreamWork(
      int rank,
      c10d::OpType kind,
      Tensors results,
      c10::Device device,
      std::shared_ptr<Collective> collective,
      bool host_waits)
      : Work(rank, kind),
        results_(std::move(results)),
        device_(device),
        collective_(std::move(collective)),
        host_waits_(host_waits),
        future_(c10::make_intrusive<at::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()),
            std::vector<c10::Device>{device})) {}

  // Called on the communicator's stream: the event of the future comes after the collective.
  void mark_launched() {
    future_->markCompleted(at::IValue(results_));
  }
  bool isCompleted() override {
    return collective_->is_done();
  }
  bool isSuccess() const override {
    return collective_->is_done() && !exception();
  }
  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> lock(collective_->comm->mutex);
    return collective_->error;
  }
  // The current stream waits, and not the host. One that does not defer, as a default stream
  // outside of strict mode, waits at once, and then the host does too.
  void synchronize() override {
    collective_->end.block(c10::impl::VirtualGuardImpl(kVirtual).getStream(device_));
  }
  bool wait(std::chrono::milliseconds) override {
    if (!host_waits_) {
      synchronize();
      return true;
    }
    collective_->end.synchronize();
    if (const auto error = exception()) {
      std::rethrow_exception(error);
    }
    return true;
  }
  void abort() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return collective_->result;
  }
  Tensors result() override {
    return results_;
  }

 private:
  Tensors results_;
  c10::Device device_;
  std::shared_ptr<Collective> collective_;
  bool host_waits_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace device_only
