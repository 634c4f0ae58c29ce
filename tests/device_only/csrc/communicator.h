// What one process has of a communicator: its collectives, one after the other, and as who waits for
// them sees them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>

namespace device_only {

constexpr auto kVirtual = c10::DeviceType::PrivateUse1;

using Tensors = std::vector<at::Tensor>;
using Body = std::function<void(const Tensors& written, const Tensors& read)>;

// Collectives run in the order in which they were launched, on whatever device and by whatever
// thread: gloo, which carries the data, matches them by their order.
struct Communicator {
  c10::intrusive_ptr<c10d::Backend> gloo;
  int rank = 0;
  std::mutex mutex;
  std::condition_variable changed;
  int64_t launched = 0;
  int64_t finished = 0;
  // Why there are no more collectives; empty as long as all went well.
  std::string failure;
};

struct Collective {
  std::shared_ptr<Communicator> comm;
  int64_t turn = 0;
  Body body;
  c10::Event end{kVirtual};
  // How it has ended, as c10d::WorkResult.
  c10::intrusive_ptr<c10::ivalue::Future> result =
      c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  // These two under comm->mutex.
  bool done = false;
  std::exception_ptr error;

  // Wait for its turn, and communicate. What fails leaves the tensors as they are.
  void run(const Tensors& written, const Tensors& read) {
    std::string failure;
    {
      std::unique_lock<std::mutex> lock(comm->mutex);
      comm->changed.wait(lock, [this] { return done || comm->finished == turn; });
      if (done) {
        return;
      }
      failure = comm->failure;
    }
    try {
      TORCH_CHECK(failure.empty(), "communicator was aborted on rank ", comm->rank, ": ", failure);
      body(written, read);
      finish(nullptr, "");
    } catch (const std::exception& error) {
      finish(std::current_exception(), error.what());
    }
  }

  void finish(std::exception_ptr what, const std::string& text) {
    std::lock_guard<std::mutex> lock(comm->mutex);
    if (done) {
      return;
    }
    done = true;
    error = what;
    if (what && comm->failure.empty()) {
      comm->failure = text;
    }
    result->markCompleted(
        static_cast<int64_t>(what ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS));
    comm->finished = turn + 1;
    comm->changed.notify_all();
  }

  bool is_done() const {
    std::lock_guard<std::mutex> lock(comm->mutex);
    return done;
  }
};

class StreamWork final : public c10d::Work {
 public:
  StreamWork(
      int rank,
      c10d::OpType kind,
      Tensors results,
      c10::Device device,
      std::shared_ptr<Collective> collective)
      : Work(rank, kind),
        results_(std::move(results)),
        device_(device),
        collective_(std::move(collective)),
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
    synchronize();
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
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace device_only
