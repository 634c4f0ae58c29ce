// Accesses to memory that nothing orders.
//
// Each stream counts its epochs: one ends where an event is recorded or the host waits. A clock
// says which epochs of which streams have happened before. Each stream and event has one, and the
// host has one for all its threads. Two accesses to the same memory, at least one of them a write,
// race if the clock of the second lacks the epoch of the first. So a race depends on what the
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

// The last epoch of each stream that has happened, without those that the host has seen: they come
// before everything that is launched later.
using Clock = std::vector<std::pair<Stream*, uint64_t>>;

bool checks_races() noexcept;
void set_checks_races(bool value);

// The bytes of a block that a tensor covers.
struct Region {
  int64_t begin = 0;
  int64_t end = 0;
  // Extents of elements with gaps between them, in bytes; empty for all bytes from begin to end.
  c10::DimVector sizes;
  c10::DimVector strides;
  int64_t itemsize = 1;
};

bool overlap(const Region& one, const Region& other);

struct Access {
  Stream* stream = nullptr;
  uint64_t epoch = 0;
  bool writes = false;
  // True if values choose the elements, as an index does: two such accesses need not meet.
  bool partial = false;
  Region region;
  c10::DimVector shape;
  at::ScalarType type = at::ScalarType::Undefined;
  // The name of the operator; null for the allocation.
  const char* what = nullptr;
  std::shared_ptr<const Place> place;
};

// Memory that streams use, and its last accesses.
struct Used : c10::intrusive_ptr_target {
  std::vector<Access> accesses;
  // True if there was any access.
  std::atomic<bool> is_used{false};
};
using Accesses = std::vector<std::pair<c10::intrusive_ptr<Used>, Access>>;

// The progress of a stream: what it has seen, and its epochs. One lock guards those of all streams.
struct Progress {
  Clock seen;
  uint64_t epoch = 1;
  uint64_t seen_by_host = 0;
  uint64_t last_access = 0;
};

// End the stream's epoch, and return its clock; work that follows a clock comes after its epochs.
Clock mark(Stream& stream);
void follow(Stream& stream, const Clock& clock);
void host_saw(const Clock& clock);

// Raise if the work must not have these accesses now; else note them as the last ones.
void settle(Stream& stream, const Accesses& accesses);

// An error that could not be raised where it was found, for instance where memory is freed. The
// next launch or wait of the host raises it, whatever stream that concerns.
struct LateError {
  std::function<void()> raise;
  // True if the error is dropped once nobody checks for races.
  bool is_race = true;
};
void raise_later(LateError error);
void raise_late();

// The accesses of one operator on a stream.
class Launch {
 public:
  Launch(Stream& stream, const char* what) : stream_(stream), what_(what) {}
  void use(const at::Tensor& tensor, bool writes, bool partial = false);
  // Add an access likewise, also to pinned memory of the host.
  void copies(const at::Tensor& tensor, bool writes);
  // Raise if something races with them; a captured stream keeps them for each replay instead.
  void check();
  // Add a result: all of a block that nobody has used yet.
  void made(const at::Tensor& tensor);

 private:
  void add(const at::Tensor& tensor, bool writes, bool partial);

  Stream& stream_;
  const char* what_;
  std::shared_ptr<const Place> place_;
  Accesses accesses_;
};

struct Block;
// Note a new block, whose memory the owner may have used before.
void note_allocation(Block& block);
void note_free(const Block& block);

// Note that the CPU uses pinned memory now. Work of streams that is not done with it yet is an
// error, which comes later.
void host_uses(const at::Tensor& tensor, bool writes, const char* what);

// Let this thread act as hardware does: the host has not seen what it waits for.
void act_as_hardware();

}  // namespace vdev
