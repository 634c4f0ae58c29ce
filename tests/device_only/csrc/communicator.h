// What one process has of a communicator: its collectives, one after the other.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <c10/core/Event.h>

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>

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

// What the operator finds its collective by: operators have plain arguments only.
class Table {
 public:
  int64_t put(std::shared_ptr<Collective> collective) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_[next_] = std::move(collective);
    return next_++;
  }
  std::shared_ptr<Collective> take(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(number);
    if (found == entries_.end()) {
      return nullptr;
    }
    auto collective = std::move(found->second);
    entries_.erase(found);
    return collective;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Collective>> entries_;
  int64_t next_ = 0;
};

inline Table& table() {
  static auto* made = new Table();
  return *made;
}

}  // namespace device_only
