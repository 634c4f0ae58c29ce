// The trace: what the program queues, allocates and waits for, in the order in which it does so;
// and the dry mode, in which nothing of it runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace vdev {

class Stream;
struct Block;
struct OperatorInfo;

namespace trace_flags {
constexpr int kRecords = 1;
constexpr int kDry = 2;
// One for each capture that is under way.
constexpr int kCapture = 4;
extern std::atomic<int> flags;
}  // namespace trace_flags

// True if somebody wants to know of launches: this load is all that others pay for.
inline bool is_noted() noexcept {
  return trace_flags::flags.load(std::memory_order_relaxed) != 0;
}
inline bool is_recording() noexcept {
  return (trace_flags::flags.load(std::memory_order_relaxed) & trace_flags::kRecords) != 0;
}
inline bool is_dry() noexcept {
  return (trace_flags::flags.load(std::memory_order_relaxed) & trace_flags::kDry) != 0;
}
void count_captures(int change);

// Turn the dry mode on or off; what is queued before runs first.
void set_dry(bool value);

// An entry. Its fields mean what dataparallel.virtual.TraceEntry says.
struct Note {
  const char* kind = "";
  std::string name;
  int device = -1;
  int64_t stream = -1;
  int64_t read = 0;
  int64_t written = 0;
  int64_t flops = 0;
  int source = -1;
  int destination = -1;
  uint64_t id = 0;
  bool replayed = false;
  uint64_t thread = 0;
  double seconds = 0;
};

// Add an entry to the trace; a captured stream keeps it for each replay instead.
void add_note(Stream& stream, Note note);
// Add those of a graph, which a replay queues on a stream.
void replay_notes(Stream& stream, const std::vector<Note>& notes);
void note_mark(const std::string& name);
void add_copy_note(Stream& stream, const at::Tensor& from, const at::Tensor& to);
// Note the position of an event, or of a host's wait for one, and return the number of the event.
uint64_t note_record(Stream& stream);
void note_wait(Stream& stream, uint64_t event);
void note_host_wait(Stream& stream, uint64_t event);
// Note that a block begins to be, is used by one more stream, or ends.
void note_block(const char* kind, const Block& block, Stream& stream);

void begin_trace();
// Stop, and return what was noted.
std::vector<Note> end_trace();
int64_t trace_length();

// The entry of an operator, from its arguments and its results.
class KernelNote {
 public:
  KernelNote(const OperatorInfo& info, at::ArrayRef<c10::IValue> arguments);
  void add(Stream& stream, at::ArrayRef<c10::IValue> results);

 private:
  const OperatorInfo& info_;
  Note note_;
  // Operations in all, and for each element of the result.
  int64_t fixed_flops_ = 0;
  int64_t flops_per_element_ = 0;
  std::vector<int64_t> reads_;
};

}  // namespace vdev
