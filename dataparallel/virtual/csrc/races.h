// Accesses to memory that nothing orders.
//
// Each stream counts its epochs: one ends where an event is recorded or the host waits. A clock says
// which epochs of which streams have happened before; streams and events have one, and the host has
// one, which all its threads share. Two accesses to the same memory, of which one writes, are a race
// where the clock of the second does not have the epoch of the first. That depends on what the
// program orders, and not on when anything runs.
#pragma once

#include "places.h"

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace vdev {

class Stream;

// The last epoch of each stream that has happened. Left out is what the host has seen: that comes
// before everything that is launched later.
using Clock = std::vector<std::pair<Stream*, uint64_t>>;

bool checks_races() noexcept;
void set_checks_races(bool value);

// The bytes of a block that a tensor covers.
struct Region {
  int64_t begin = 0;
  int64_t end = 0;
  // Of elements that have gaps between them, in bytes; empty for all bytes from begin to end.
  c10::DimVector sizes;
  c10::DimVector strides;
  int64_t itemsize = 1;
};

bool overlap(const Region& one, const Region& other);

struct Access {
  Stream* stream = nullptr;
  uint64_t epoch = 0;
  bool writes = false;
  // Of elements that values choose, as an index does: two of them need not meet.
  bool partial = false;
  Region region;
  c10::DimVector shape;
  at::ScalarType type = at::ScalarType::Undefined;
  // Of an operator; null for the allocation.
  const char* what = nullptr;
  std::shared_ptr<const Place> place;
};

// Memory that streams use, and its last accesses.
struct Used : c10::intrusive_ptr_target {
  std::vector<Access> accesses;
  // Whether there was any.
  std::atomic<bool> is_used{false};
};
using Accesses = std::vector<std::pair<c10::intrusive_ptr<Used>, Access>>;

// What a stream knows. Of all streams under one lock.
struct Progress {
  Clock seen;
  uint64_t epoch = 1;
  uint64_t seen_by_host = 0;
  uint64_t last_access = 0;
};

// What is launched from now on must come after the work that the clock says.
Clock mark(Stream& stream);
void follow(Stream& stream, const Clock& clock);
void host_saw(const Clock& clock);

// Raises if the work must not have these accesses now; else they are the last ones.
void settle(Stream& stream, const Accesses& accesses);

// An error that could not be raised where it was found, as where memory is freed. The next launch
// or wait of the host raises it, whatever stream that concerns.
struct LateError {
  std::function<void()> raise;
  // If so, nobody wants it once the checks are off.
  bool is_race = true;
};
void raise_later(LateError error);
void raise_late();

// The accesses of one operator on a stream.
class Launch {
 public:
  Launch(Stream& stream, const char* what) : stream_(stream), what_(what) {}
  void use(const at::Tensor& tensor, bool writes, bool partial = false);
  // As that; in memory of the host that is pinned, too.
  void copies(const at::Tensor& tensor, bool writes);
  // Raises if something races with them; a stream that is captured keeps them for each replay.
  void check();
  // A result: all of a block that nobody has used yet.
  void made(const at::Tensor& tensor);

 private:
  void add(const at::Tensor& tensor, bool writes, bool partial);

  Stream& stream_;
  const char* what_;
  std::shared_ptr<const Place> place_;
  Accesses accesses_;
};

struct Block;
// A new block, whose memory the owner may have used before.
void note_allocation(Block& block);
void note_free(const Block& block);

// The CPU reads or writes pinned memory now. What streams have not done with it yet is an error,
// which comes later.
void host_uses(const at::Tensor& tensor, bool writes, const char* what);

// This thread does what hardware does by itself: what it waits for, the host has not seen.
void act_as_hardware();

}  // namespace vdev
