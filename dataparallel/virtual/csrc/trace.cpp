#include "trace.h"

#include "fallback.h"

#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string_view>
#include <thread>

namespace vdev {

std::atomic<int> trace_flags::flags{0};

namespace {

std::mutex& trace_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

// Under the lock.
std::vector<Note>& all_notes() {
  static auto* notes = new std::vector<Note>();
  return *notes;
}

std::atomic<uint64_t> last_event{0};
std::atomic<uint64_t> last_thread{0};

uint64_t this_thread() {
  thread_local const uint64_t number = ++last_thread;
  return number;
}

void set_flag(int flag, bool value) {
  if (value) {
    trace_flags::flags.fetch_or(flag);
  } else {
    trace_flags::flags.fetch_and(~flag);
  }
}

// Turns of the threads that launch in dry mode. Each would run as long as the system lets it, and
// the trace would show one device far ahead of the others. So each has a clock, which its launches
// advance by about what they cost a host, and waits for the threads whose clocks are behind.
class Turns {
 public:
  void begin() {
    std::lock_guard<std::mutex> lock(mutex_);
    threads_.clear();
  }

  void take(const Note& note) {
    const int64_t cost = cost_of(note);
    if (cost == 0) {
      return;
    }
    const uint64_t me = note.thread;
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t mine = threads_[me].clock += cost;
    threads_[me].last = Time::now();
    const auto is_behind = [&](const auto& each) {
      return each.second.clock + kAhead < mine && Time::now() - each.second.last < kMoment;
    };
    while (std::any_of(threads_.begin(), threads_.end(), is_behind)) {
      lock.unlock();
      {
        const GilRelease no_gil;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      lock.lock();
    }
    threads_[me].last = Time::now();
  }

 private:
  using Time = std::chrono::steady_clock;
  // A thread that has launched nothing for so long waits for others, or has ended.
  static constexpr std::chrono::milliseconds kMoment{10};
  static constexpr int64_t kAhead = 16;

  // In microseconds.
  static int64_t cost_of(const Note& note) {
    const std::string_view kind = note.kind;
    if (note.replayed) {
      return 0;
    }
    return kind == "kernel" ? 8 : kind == "copy" ? 15 : kind == "record" || kind == "wait" ? 2 : 0;
  }

  struct Turn {
    int64_t clock = 0;
    Time::time_point last;
  };
  std::mutex mutex_;
  std::map<uint64_t, Turn> threads_;
};

Turns& turns() {
  static auto* instance = new Turns();
  return *instance;
}

void append(Note note) {
  note.thread = this_thread();
  if (is_dry()) {
    turns().take(note);
  }
  std::lock_guard<std::mutex> lock(trace_mutex());
  if (is_recording()) {
    note.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    all_notes().push_back(std::move(note));
  }
}

// Return the bytes that a tensor has of its own: an expanded one has fewer than elements.
int64_t bytes_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return 0;
  }
  const auto whole = static_cast<int64_t>(tensor.storage().nbytes());
  return std::min(static_cast<int64_t>(tensor.nbytes()), whole);
}

bool has(const std::string& name, const char* part) {
  return name.find(part) != std::string::npos;
}

int64_t size_of(const c10::IValue& value, int64_t dim) {
  return value.isTensor() && value.toTensor().defined() ? value.toTensor().size(dim) : 0;
}

int64_t taps_of(const c10::IValue& weight) {
  const int64_t outputs = size_of(weight, 0);
  return outputs == 0 ? 0 : weight.toTensor().numel() / outputs;
}

}  // namespace

void count_captures(int change) {
  trace_flags::flags.fetch_add(change * trace_flags::kCapture);
}

void set_dry(bool value) {
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    synchronize_device(index);
  }
  set_flag(trace_flags::kDry, value);
}

void add_note(Stream& stream, Note note) {
  note.device = stream.device;
  note.stream = stream.id;
  if (Graph* graph = stream.graph()) {
    graph->add(std::move(note));
  } else if (is_recording()) {
    append(std::move(note));
  }
}

void replay_notes(Stream& stream, const std::vector<Note>& notes) {
  if (!is_recording()) {
    return;
  }
  add_note(stream, Note{"replay", ""});
  for (Note note : notes) {
    note.replayed = true;
    add_note(stream, std::move(note));
  }
}

void note_mark(const std::string& name) {
  turns().begin();
  append(Note{"mark", name});
}

void add_copy_note(Stream& stream, const at::Tensor& from, const at::Tensor& to) {
  Note note{"copy", "aten::copy_"};
  note.read = static_cast<int64_t>(from.nbytes());
  note.written = static_cast<int64_t>(to.nbytes());
  note.source = is_virtual(from) ? from.device().index() : -1;
  note.destination = is_virtual(to) ? to.device().index() : -1;
  if (note.source == note.destination) {
    note.kind = "kernel";
    note.source = note.destination = -1;
  }
  add_note(stream, std::move(note));
}

uint64_t note_record(Stream& stream) {
  if (stream.capturing() || !is_recording()) {
    return 0;
  }
  Note note{"record", ""};
  const uint64_t id = note.id = ++last_event;
  add_note(stream, std::move(note));
  return id;
}

void note_wait(Stream& stream, uint64_t event) {
  if (event != 0 && !stream.capturing()) {
    Note note{"wait", ""};
    note.id = event;
    add_note(stream, std::move(note));
  }
}

void note_host_wait(Stream& stream, uint64_t event) {
  if (!stream.capturing()) {
    Note note{"host_wait", ""};
    note.id = event;
    add_note(stream, std::move(note));
  }
}

void note_block(const char* kind, const Block& block, Stream& stream) {
  Note note{kind, ""};
  note.device = stream.device;
  note.stream = stream.id;
  note.written = static_cast<int64_t>(block.nbytes);
  note.id = reinterpret_cast<uint64_t>(&block);
  append(std::move(note));
}

void begin_trace() {
  std::lock_guard<std::mutex> lock(trace_mutex());
  TORCH_CHECK(!is_recording(), "a trace is being recorded already");
  all_notes().clear();
  set_flag(trace_flags::kRecords, true);
}

std::vector<Note> end_trace() {
  std::lock_guard<std::mutex> lock(trace_mutex());
  set_flag(trace_flags::kRecords, false);
  return std::exchange(all_notes(), {});
}

int64_t trace_length() {
  std::lock_guard<std::mutex> lock(trace_mutex());
  return static_cast<int64_t>(all_notes().size());
}

KernelNote::KernelNote(const OperatorInfo& info, at::ArrayRef<c10::IValue> arguments)
    : info_(info), note_{"kernel", info.name} {
  const std::string& name = info.op_name.name;
  const bool only_writes =
      info.is_sampler || has(name, "::fill_") || has(name, "::zero_") || has(name, "_foreach_zero_");
  for (const auto& each : info.tensors) {
    const bool is_output =
        info.schema->arguments()[static_cast<size_t>(each.index)].is_out() || only_writes;
    visit_tensors(arguments[static_cast<size_t>(each.index)], [&](const at::Tensor& tensor) {
      note_.written += each.writes ? bytes_of(tensor) : 0;
      if (!(each.writes && is_output) && !info.reads_nothing && is_virtual(tensor)) {
        reads_.push_back(bytes_of(tensor));
      }
    });
  }
  // Matrix products and what is made of them; other operators are limited by memory.
  if (name == "aten::mm" || name == "aten::bmm") {
    flops_per_element_ = 2 * size_of(arguments[0], -1);
  } else if (has(name, "aten::addmm") || has(name, "aten::_addmm") || has(name, "aten::baddbmm")) {
    flops_per_element_ = 2 * size_of(arguments[1], -1);
  } else if (name == "aten::convolution") {
    if (arguments[6].toBool()) {
      fixed_flops_ = 2 * arguments[0].toTensor().numel() * taps_of(arguments[1]);
    } else {
      flops_per_element_ = 2 * taps_of(arguments[1]);
    }
  } else if (name == "aten::convolution_backward") {
    const bool transposed = arguments[7].toBool();
    const int64_t outputs = arguments[transposed ? 1 : 0].toTensor().numel();
    const auto wanted = arguments[10].toBoolList();
    fixed_flops_ = 2 * (wanted.get(0) + wanted.get(1)) * outputs * taps_of(arguments[2]);
  }
}

void KernelNote::add(Stream& stream, at::ArrayRef<c10::IValue> results) {
  int64_t made = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    visit_tensors(results[i], [&](const at::Tensor& tensor) {
      made += bytes_of(tensor);
      if (i == 0) {
        note_.flops = fixed_flops_ + flops_per_element_ * tensor.numel();
      }
      note_.written += info_.returns[i].written_argument < 0 ? bytes_of(tensor) : 0;
    });
  }
  for (const int64_t bytes : reads_) {
    // An index reads as much of a table as it gives.
    note_.read += info_.is_partial ? std::min(bytes, made) : bytes;
  }
  add_note(stream, std::move(note_));
}

}  // namespace vdev
