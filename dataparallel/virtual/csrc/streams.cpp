#include <Python.h>

#include "memory.h"
#include "schedule.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <chrono>

namespace vdev {
namespace {

constexpr int kPollsBeforeRunning = 1000;
constexpr size_t kMaxStreams = 4096;
constexpr size_t kPoolSize = 32;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class TimestampTask final : public Task {
 public:
  explicit TimestampTask(std::shared_ptr<Record> record) : record_(std::move(record)) {}
  void run() override {
    record_->seconds.store(now());
  }
  std::string name() const override {
    return "event";
  }

 private:
  std::shared_ptr<Record> record_;
};

class ReplayTask final : public Task {
 public:
  explicit ReplayTask(std::shared_ptr<Task> task) : task_(std::move(task)) {}
  void run() override {
    task_->run();
  }
  std::string name() const override {
    return task_->name();
  }
  bool may_block() const override {
    return task_->may_block();
  }

 private:
  std::shared_ptr<Task> task_;
};

// Slots are filled once and never emptied, so that a lookup needs no lock. Slot 0 is the default
// stream. The next ones are the pool, and the rest belong to torch.Stream(...).
struct StreamTable {
  std::array<std::atomic<Stream*>, kMaxStreams> slots{};
  std::atomic<size_t> next_pooled{0};
  std::atomic<size_t> next_new{0};

  Stream& get(c10::DeviceIndex device, size_t slot) {
    Stream* found = slots[slot].load(std::memory_order_acquire);
    if (found == nullptr) {
      auto* made = new Stream(device, static_cast<c10::StreamId>(slot));
      if (slots[slot].compare_exchange_strong(found, made)) {
        return *made;
      }
      delete made;
    }
    return *found;
  }
};

StreamTable& table(c10::DeviceIndex device) {
  // Leaked: tensors may be freed and streams asked for after static destruction.
  static auto* tables = new std::array<StreamTable, kMaxDevices>();
  return (*tables)[static_cast<size_t>(device)];
}

thread_local std::array<Stream*, kMaxDevices> current_streams{};

void complete(Stream& stream) {
  const Clock clock = checks_races() ? mark(stream) : Clock();
  if (is_noted()) {
    note_host_wait(stream, 0);
  }
  stream.synchronize();
  host_saw(clock);
}

}  // namespace

GilRelease::GilRelease() {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    state_ = PyEval_SaveThread();
  }
}

GilRelease::~GilRelease() {
  if (state_ != nullptr) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  }
}

bool Record::reached() const noexcept {
  return stream.reached(position);
}

bool Record::poll() {
  if (!reached() && polls_.fetch_add(1) >= kPollsBeforeRunning) {
    stream.run_until(position);
  }
  return reached();
}

bool Stream::poll() {
  if (!idle() && polls_.fetch_add(1) >= kPollsBeforeRunning) {
    synchronize();
  }
  return idle();
}

void Stream::push(Item item) {
  if (item.counted) {
    pending_.fetch_add(1);
  }
  polls_.store(0);
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(item));
  submitted_.fetch_add(1, std::memory_order_release);
}

void Stream::submit(std::unique_ptr<Task> task) {
  if (is_dry()) {
    return;
  }
  if (Graph* graph = graph_.load()) {
    graph->add(std::move(task));
    return;
  }
  push(Item{std::move(task), nullptr, true});
  if (!defers()) {
    synchronize();
  }
  run_ahead(*this);
}

void Stream::submit_marker(std::unique_ptr<Task> task) {
  if (idle()) {
    task->run();
    return;
  }
  push(Item{std::move(task), nullptr, false});
}

std::shared_ptr<Record> Stream::record(bool timed) {
  auto record = std::make_shared<Record>(*this, submitted_.load());
  if (checks_races()) {
    record->clock = mark(*this);
  }
  if (is_noted()) {
    record->number = note_record(*this);
  }
  if (idle()) {
    record->seconds.store(now());
  } else if (timed) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(Item{std::make_unique<TimestampTask>(record), nullptr, false});
    record->position = submitted_.fetch_add(1) + 1;
  }
  return record;
}

void Stream::wait(const std::shared_ptr<Record>& record) {
  if (checks_races()) {
    follow(*this, record->clock);
  }
  if (is_noted()) {
    note_wait(*this, record->number);
  }
  if (&record->stream == this || record->reached()) {
    return;
  }
  if (!defers()) {
    record->stream.run_until(record->position);
    return;
  }
  push(Item{nullptr, record, false});
  run_ahead(*this);
}

void Stream::synchronize() {
  TORCH_CHECK(!capturing(), "operation not permitted when stream is capturing");
  run_until(submitted_.load(std::memory_order_acquire));
}

void Stream::capture(Graph* graph) {
  TORCH_CHECK(id != 0, "graphs must be captured on a stream that is not the default one");
  Graph* none = nullptr;
  TORCH_CHECK(
      graph == nullptr || graph_.compare_exchange_strong(none, graph),
      "the stream is being captured already");
  if (graph == nullptr) {
    graph_.store(nullptr);
  }
}

void Graph::begin(Stream& stream) {
  stream.synchronize();
  stream.capture(this);
  stream_ = &stream;
  device_ = stream.device;
  count_captures(1);
}

void Graph::add(std::shared_ptr<Task> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
}

void Graph::add(Note note) {
  std::lock_guard<std::mutex> lock(mutex_);
  notes_.push_back(std::move(note));
}

void Graph::add(const Accesses& accesses) {
  std::lock_guard<std::mutex> lock(mutex_);
  accesses_.insert(accesses_.end(), accesses.begin(), accesses.end());
}

Graph::~Graph() {
  end();
}

void Graph::end() {
  // One of several threads ends it.
  if (Stream* stream = stream_.exchange(nullptr)) {
    stream->capture(nullptr);
    count_captures(-1);
  }
}

void Graph::replay() const {
  TORCH_CHECK(stream_ == nullptr, "a graph cannot be replayed before its capture has ended");
  Stream& stream = current_stream(device_);
  if (checks_races()) {
    settle(stream, accesses_);
  }
  if (is_noted()) {
    replay_notes(stream, notes_);
  }
  for (const auto& task : tasks_) {
    stream.submit(std::make_unique<ReplayTask>(task));
  }
}

// Make one attempt to bring this stream nearer to `position`.
Stream::Step Stream::step(uint64_t position, std::shared_ptr<Record>& blocker) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (reached(position)) {
    return Step::kDone;
  }
  if (running_) {
    changed_.wait(lock);
    return Step::kAgain;
  }
  Item& front = queue_.front();
  if (front.awaited && !front.awaited->reached()) {
    blocker = front.awaited;
    return Step::kBlocked;
  }
  Item item = take();
  lock.unlock();
  execute(std::move(item));
  return Step::kAgain;
}

Stream::Item Stream::take() {
  Item item = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  return item;
}

bool Stream::is_ready_locked() const {
  if (queue_.empty() || running_) {
    return false;
  }
  const Item& front = queue_.front();
  return front.awaited ? front.awaited->reached() : !front.task->may_block();
}

bool Stream::is_ready() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_ready_locked();
}

void Stream::run_next() {
  Item item;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_ready_locked()) {
      return;
    }
    item = take();
  }
  execute(std::move(item));
}

void Stream::execute(Item item) {
  std::exception_ptr error;
  const bool counted = item.counted;
  try {
    if (item.task) {
      item.task->run();
    }
  } catch (c10::Error& failure) {
    failure.add_context(c10::str(
        "while running deferred ", item.task->name(), " on virtual:", static_cast<int>(device),
        ", stream ", id));
    error = std::current_exception();
  } catch (const std::exception& failure) {
    error = std::make_exception_ptr(c10::Error(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        c10::str(
            failure.what(), "\nwhile running deferred ", item.task->name(),
            " on virtual:", static_cast<int>(device), ", stream ", id)));
  }
  item = Item{};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    running_ = false;
    completed_.fetch_add(1, std::memory_order_release);
    if (counted) {
      pending_.fetch_sub(1);
    }
  }
  changed_.notify_all();
  if (error) {
    std::rethrow_exception(error);
  }
}

void Stream::run_until(uint64_t position) {
  if (reached(position)) {
    return;
  }
  check_not_forked();
  GilRelease no_gil;
  struct Goal {
    Stream* stream;
    uint64_t position;
  };
  // The stack is explicit: streams that wait on each other in turn make chains of any depth.
  c10::SmallVector<Goal, 8> goals{{this, position}};
  while (!goals.empty()) {
    const Goal goal = goals.back();
    run_ahead(*goal.stream);
    std::shared_ptr<Record> blocker;
    switch (goal.stream->step(goal.position, blocker)) {
      case Step::kDone:
        goals.pop_back();
        break;
      case Step::kAgain:
        break;
      case Step::kBlocked:
        goals.push_back({&blocker->stream, blocker->position});
        break;
    }
  }
}

Stream& stream_at(c10::DeviceIndex device, c10::StreamId id) {
  TORCH_CHECK(
      id >= 0 && static_cast<size_t>(id) < kMaxStreams, "virtual:", static_cast<int>(device),
      " has no stream ", id);
  return table(checked_index(device)).get(device, static_cast<size_t>(id));
}

Stream& current_stream(c10::DeviceIndex device) {
  Stream*& current = current_streams[static_cast<size_t>(checked_index(device))];
  if (current == nullptr) {
    current = &stream_at(device, 0);
  }
  return *current;
}

void set_current_stream(Stream& stream) {
  current_streams[static_cast<size_t>(stream.device)] = &stream;
}

Stream& new_stream(c10::DeviceIndex device) {
  auto& streams = table(checked_index(device));
  const size_t own = kMaxStreams - 1 - kPoolSize;
  return streams.get(device, 1 + kPoolSize + streams.next_new.fetch_add(1) % own);
}

Stream& pooled_stream(c10::DeviceIndex device) {
  auto& streams = table(checked_index(device));
  return streams.get(device, 1 + streams.next_pooled.fetch_add(1) % kPoolSize);
}

void for_each_stream(c10::DeviceIndex device, const std::function<void(Stream&)>& visit) {
  for (auto& slot : table(checked_index(device)).slots) {
    if (Stream* stream = slot.load(std::memory_order_acquire)) {
      visit(*stream);
    }
  }
}

void synchronize_device(c10::DeviceIndex device) {
  for_each_stream(device, &complete);
  raise_late();
}

void host_waits_for(Stream& stream) {
  complete(stream);
  raise_late();
}

int64_t pending_on_device(c10::DeviceIndex device) {
  int64_t total = 0;
  for_each_stream(device, [&](Stream& stream) { total += stream.pending(); });
  return total;
}

void set_strict(bool value) {
  set_strict_flag(value);
  if (value) {
    set_checks_races(true);
  } else {
    // Work deferred so far on a default stream must precede what it now runs at once.
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      stream_at(index, 0).synchronize();
    }
  }
}

}  // namespace vdev
