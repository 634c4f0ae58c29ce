// The part of a communicator that one process has: its collectives, one after the other, and as
// whoever waits for them sees them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <tuple>

namespace device_only {

constexpr auto kVirtual = c10::DeviceType::PrivateUse1;

using Tensors = std::vector<at::Tensor>;
using Body = std::function<void(const Tensors& written, const Tensors& read)>;

// Acts of this process that hardware would not forgive, for the tests to read.
struct Habits {
  std::mutex mutex;
  // Collectives after whose time limit NCCL's watchdog would have ended the process.
  std::vector<std::string> kills;
  // Launches, in their order: the device, the name of the communicator, the number, a description.
  std::vector<std::tuple<int, std::string, int64_t, std::string>> launches;
  // The least milliseconds that it takes to make a communicator.
  std::atomic<int64_t> setup{0};
  // True if devices of one number are one device, in whatever process.
  std::atomic<bool> physical{true};
};

inline Habits& habits() {
  static auto* all = new Habits();
  return *all;
}

// Collectives run in the order in which they were launched, on whatever device and by whatever
// thread: gloo, which carries the data, matches them by their order.
struct Communicator {
  c10::intrusive_ptr<c10d::Backend> gloo;
  c10::intrusive_ptr<c10d::Store> store;
  std::string name;
  int rank = 0;
  int size = 1;
  std::atomic<int64_t> limit{0};
  std::mutex mutex;
  std::condition_variable changed;
  int64_t launched = 0;
  int64_t finished = 0;
  // The reason why there are no more collectives; empty as long as all goes well.
  std::string failure;

  // Return what all ranks say about one thing, as soon as all have come to it. A rank that does not
  // come is waited for until abort(), or until `goes_on` throws.
  std::vector<std::string> meet(
      const std::string& what, const std::string& said, const std::function<void()>& goes_on) {
    std::vector<std::string> keys;
    for (int i = 0; i < size; ++i) {
      keys.push_back(c10::str(what, "/", i));
    }
    store->set(keys[rank], std::vector<uint8_t>(said.begin(), said.end()));
    auto pause = std::chrono::microseconds(100);
    while (!store->check(keys)) {
      std::unique_lock<std::mutex> lock(mutex);
      TORCH_CHECK(failure.empty(), "communicator was aborted: ", failure);
      changed.wait_for(lock, pause);
      lock.unlock();
      goes_on();
      pause = std::min(2 * pause, std::chrono::microseconds(5000));
    }
    std::vector<std::string> found;
    for (const auto& key : keys) {
      const auto value = store->get(key);
      found.emplace_back(value.begin(), value.end());
    }
    return found;
  }
};

struct Collective {
  std::shared_ptr<Communicator> comm;
  int64_t turn = 0;
  Body body;
  std::string description;
  std::chrono::steady_clock::time_point launched = std::chrono::steady_clock::now();
  c10::Event end{kVirtual};
  // The result, as c10d::WorkResult.
  c10::intrusive_ptr<c10::ivalue::Future> result =
      c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  // These two under comm->mutex.
  bool done = false;
  std::exception_ptr error;

  // Wait for its turn, and communicate. A failure leaves the tensors as they are.
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
      meet();
      body(written, read);
      finish(nullptr, "");
    } catch (const std::exception& error) {
      finish(std::current_exception(), error.what());
    }
  }

  // Meet the other ranks. NCCL's kernel waits for ever, and finds no difference in their launches.
  void meet() const {
    const auto said = comm->meet(c10::str("launch/", turn), description, [this] { watch(); });
    for (int i = 0; i < comm->size; ++i) {
      TORCH_CHECK(
          said[i] == description,
          "vccl: ranks launched different collectives as number ", turn, " of '", comm->name,
          "': rank ", comm->rank, " ", description, ", rank ", i, " ", said[i]);
    }
  }

  // Mind the time limit, at which the watchdog ends the process. Here the collective ends.
  void watch() const {
    const auto since = std::chrono::steady_clock::now() - launched;
    if (since < std::chrono::milliseconds(comm->limit)) {
      return;
    }
    const auto text = c10::str(description, ", number ", turn, " of '", comm->name, "'");
    {
      std::lock_guard<std::mutex> lock(habits().mutex);
      habits().kills.push_back(text);
    }
    TORCH_CHECK(false, "the watchdog would have ended the process: timed out: ", text);
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
  // Make the current stream wait, and not the host. A stream that does not defer, as a default
  // stream outside of strict mode, waits at once, and then the host does too.
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
