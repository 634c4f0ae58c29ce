// Streams whose work runs as late as their contract allows, and events that mark a position.
//
// No thread of its own executes a stream: whoever waits for work runs it. So work that nobody has
// waited for has visibly not happened.
#pragma once

#include "devices.h"
#include "races.h"
#include "trace.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace vdev {

class Graph;
class Stream;

// A piece of work for a stream. It is destroyed without any lock held, because it may own host
// memory whose destruction needs the interpreter.
class Task {
 public:
  virtual ~Task() = default;
  virtual void run() = 0;
  virtual std::string name() const = 0;
  // True for work that may wait for other processes: a launch must not run it.
  virtual bool may_block() const {
    return false;
  }
};

// A position in a stream: what an event records. The work before it has run, or not.
class Record {
 public:
  Record(Stream& stream, uint64_t position) : stream(stream), position(position) {}
  bool reached() const noexcept;
  // Return false while pending. A loop that only polls must end as it does on hardware, so after
  // very many polls the work is run.
  bool poll();

  Stream& stream;
  uint64_t position;
  std::atomic<double> seconds{-1.0};
  // The clock of the stream when it is reached.
  Clock clock;
  // The number of the event in the trace; 0 for none.
  uint64_t number = 0;

 private:
  std::atomic<int> polls_{0};
};

class Stream {
 public:
  Stream(c10::DeviceIndex device, c10::StreamId id) : device(device), id(id) {}

  // False if submitted work has run when the submission returns.
  bool defers() const noexcept {
    return id != 0 || strict() || is_dry();
  }

  void submit(std::unique_ptr<Task> task);
  // Run a task at its position in the stream without counting it as pending; at once if idle.
  void submit_marker(std::unique_ptr<Task> task);
  std::shared_ptr<Record> record(bool timed);
  void wait(const std::shared_ptr<Record>& record);

  bool idle() const noexcept {
    return completed_.load(std::memory_order_acquire) ==
        submitted_.load(std::memory_order_acquire);
  }
  bool reached(uint64_t position) const noexcept {
    return completed_.load(std::memory_order_acquire) >= position;
  }
  // Return the graph that gets what is submitted, if the stream is captured.
  Graph* graph() const noexcept {
    return graph_.load();
  }
  bool capturing() const noexcept {
    return graph() != nullptr;
  }
  void capture(Graph* graph);
  int64_t pending() const noexcept {
    return pending_.load();
  }
  bool poll();
  void synchronize();
  void run_until(uint64_t position);
  // True if the next item could run now, and waits for nobody.
  bool is_ready() const;
  void run_next();

  const c10::DeviceIndex device;
  const c10::StreamId id;
  Progress progress;
  // Freed memory of this stream's own, to be handed out again.
  std::atomic<int64_t> cached_bytes{0};

 private:
  struct Item {
    std::unique_ptr<Task> task;
    std::shared_ptr<Record> awaited;
    bool counted = false;
  };
  enum class Step { kDone, kAgain, kBlocked };

  void push(Item item);
  bool is_ready_locked() const;
  Item take();
  Step step(uint64_t position, std::shared_ptr<Record>& blocker);
  void execute(Item item);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  bool running_ = false;
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> completed_{0};
  std::atomic<int64_t> pending_{0};
  std::atomic<int> polls_{0};
  std::atomic<Graph*> graph_{nullptr};
};

// The work that was submitted to a stream while it was captured, to be run as often as wanted.
class Graph {
 public:
  ~Graph();
  void begin(Stream& stream);
  void add(std::shared_ptr<Task> task);
  // Add accesses that each replay has, all at once.
  void add(const Accesses& accesses);
  void add(Note note);
  void end();
  void replay() const;

 private:
  std::mutex mutex_;
  std::atomic<Stream*> stream_{nullptr};
  std::atomic<c10::DeviceIndex> device_{0};
  std::vector<std::shared_ptr<Task>> tasks_;
  Accesses accesses_;
  std::vector<Note> notes_;
};

Stream& stream_at(c10::DeviceIndex device, c10::StreamId id);
inline Stream& stream_of(const c10::Stream& stream) {
  return stream_at(stream.device_index(), stream.id());
}
inline c10::Stream handle_of(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(stream.device), stream.id);
}
Stream& current_stream(c10::DeviceIndex device);
void set_current_stream(Stream& stream);
Stream& new_stream(c10::DeviceIndex device);
Stream& pooled_stream(c10::DeviceIndex device);
void for_each_stream(c10::DeviceIndex device, const std::function<void(Stream&)>& visit);
void synchronize_device(c10::DeviceIndex device);
// Wait as a program does: what it launches afterwards comes after the stream's work.
void host_waits_for(Stream& stream);
int64_t pending_on_device(c10::DeviceIndex device);
void set_strict(bool value);

// A release of the interpreter's lock while waiting for or running work, which may need it.
class GilRelease {
 public:
  GilRelease();
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  void* state_ = nullptr;
};

}  // namespace vdev
