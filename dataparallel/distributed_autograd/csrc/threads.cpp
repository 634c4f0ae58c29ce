#include "threads.h"

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace dataparallel {

namespace {

// To start a thread costs as much as a message, and Python keeps a state for each.
constexpr size_t kIdleThreads = 16;

class Threads {
 public:
  void run(std::function<void()> job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++running_;
      if (idle_ > jobs_.size()) {
        jobs_.push_back(std::move(job));
        arrived_.notify_one();
        return;
      }
    }
    std::thread([this, job = std::move(job)]() mutable {
      // One state of the interpreter for the thread's life, as torch's own engine threads have:
      // an error that Python code raised belongs to it until the engine has kept it.
      const pybind11::gil_scoped_acquire gil;
      const pybind11::gil_scoped_release no_gil;
      do {
        job();
        job = nullptr;
        ended();
      } while (next(job));
    }).detach();
  }

  bool wait(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return none_.wait_for(
        lock, std::chrono::duration<double>(seconds), [&] { return running_ == 0; });
  }

 private:
  void ended() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      --running_;
    }
    none_.notify_all();
  }

  bool next(std::function<void()>& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (idle_ >= kIdleThreads) {
      return false;
    }
    ++idle_;
    arrived_.wait(lock, [&] { return !jobs_.empty(); });
    --idle_;
    job = std::move(jobs_.front());
    jobs_.pop_front();
    return true;
  }

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable none_;
  size_t idle_ = 0;
  size_t running_ = 0;
  std::deque<std::function<void()>> jobs_;
};

// Never destroyed: the threads wait in it until the process ends. A forked child has none of them
// and begins anew.
Threads& threads() {
  static std::mutex mutex;
  static Threads* threads = new Threads();
  static pid_t owner = getpid();
  std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) {
    threads = new Threads();
    owner = getpid();
  }
  return *threads;
}

} // namespace

void run_in_thread(std::function<void()> job) {
  threads().run(std::move(job));
}

bool wait_for_threads(double seconds) {
  return threads().wait(seconds);
}

} // namespace dataparallel
