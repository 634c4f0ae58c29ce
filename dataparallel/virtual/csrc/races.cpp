#include "races.h"

#include "alias.h"

#include <ATen/core/TensorBody.h>
#include <torch/library.h>

#include <algorithm>
#include <sstream>

namespace vdev {
namespace {

constexpr size_t kMostPieces = 1 << 16;
constexpr size_t kMostAccesses = 4096;

std::atomic<bool> races_flag{false};
thread_local bool is_hardware = false;

std::mutex& clocks_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

std::atomic<bool> has_late{false};

// The errors are under the same lock.
std::vector<LateError>& late_errors() {
  static auto* errors = new std::vector<LateError>();
  return *errors;
}

uint64_t known(const Clock& clock, const Stream* stream) {
  for (const auto& [each, epoch] : clock) {
    if (each == stream) {
      return epoch;
    }
  }
  return 0;
}

void join(Clock& clock, const Clock& other) {
  const auto seen = [](const auto& entry) {
    return entry.second <= entry.first->progress.seen_by_host;
  };
  clock.erase(std::remove_if(clock.begin(), clock.end(), seen), clock.end());
  for (const auto& entry : other) {
    const auto same = [&](const auto& own) { return own.first == entry.first; };
    const auto found = std::find_if(clock.begin(), clock.end(), same);
    if (found != clock.end()) {
      found->second = std::max(found->second, entry.second);
    } else if (!seen(entry)) {
      clock.push_back(entry);
    }
  }
}

bool is_past(const Access& access) {
  return access.epoch <= access.stream->progress.seen_by_host;
}

bool is_before(const Access& access, const Stream& stream) {
  return access.stream == &stream || is_past(access) ||
      access.epoch <= known(stream.progress.seen, access.stream);
}

// --- regions ------------------------------------------------------------------------------------

Region region_of(const at::Tensor& tensor) {
  Region made;
  made.itemsize = static_cast<int64_t>(tensor.itemsize());
  made.begin = tensor.storage_offset() * made.itemsize;
  made.end = made.begin + made.itemsize;
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) != 0) {
      dims.emplace_back(tensor.stride(i) * made.itemsize, tensor.size(i));
      made.end += (tensor.size(i) - 1) * tensor.stride(i) * made.itemsize;
    }
  }
  std::sort(dims.begin(), dims.end());
  for (const auto& [stride, size] : dims) {
    if (made.sizes.empty() && stride <= made.itemsize) {
      made.itemsize += (size - 1) * stride;  // No gap up to here.
    } else {
      made.sizes.push_back(size);
      made.strides.push_back(stride);
    }
  }
  return made;
}

// Return the ranges of bytes without a gap, in order; nothing where there are too many.
std::vector<std::pair<int64_t, int64_t>> pieces_of(const Region& region) {
  std::vector<std::pair<int64_t, int64_t>> pieces{
      {region.begin, region.sizes.empty() ? region.end : region.begin + region.itemsize}};
  for (size_t i = 0; i < region.sizes.size(); ++i) {
    const size_t count = pieces.size();
    if (count * static_cast<size_t>(region.sizes[i]) > kMostPieces) {
      return {};
    }
    for (int64_t step = 1; step < region.sizes[i]; ++step) {
      for (size_t j = 0; j < count; ++j) {
        const int64_t distance = step * region.strides[i];
        pieces.emplace_back(pieces[j].first + distance, pieces[j].second + distance);
      }
    }
  }
  std::sort(pieces.begin(), pieces.end());
  return pieces;
}

// Return a tensor's memory, and the part that the tensor covers; null for memory nobody checks.
std::pair<c10::intrusive_ptr<Used>, Region> memory_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return {};
  }
  Region region = region_of(tensor);
  if (is_virtual(tensor)) {
    return {block_of(tensor.storage().data_ptr()), std::move(region)};
  }
  auto [block, offset] = pinned_block_of(tensor);
  region.begin += offset;
  region.end += offset;
  return {std::move(block), std::move(region)};
}

Access access_of(const at::Tensor& tensor, Region region, bool writes, const char* what) {
  Access access;
  access.writes = writes;
  access.region = std::move(region);
  access.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
  access.type = tensor.scalar_type();
  access.what = what;
  return access;
}

bool contains(const Region& whole, const Region& part) {
  if (whole.sizes.empty()) {
    return whole.begin <= part.begin && part.end <= whole.end;
  }
  return whole.begin == part.begin && whole.sizes == part.sizes && whole.strides == part.strides &&
      whole.itemsize == part.itemsize;
}

// --- messages -----------------------------------------------------------------------------------

std::string name_of(const Stream& stream) {
  return c10::str(
      stream.id == 0 ? std::string("the default stream") : c10::str("stream ", stream.id),
      " of virtual:", static_cast<int>(stream.device));
}

std::string describe(const Access& access) {
  const std::string stream = access.stream ? name_of(*access.stream) : "the host";
  if (access.what == nullptr) {
    return c10::str("the allocation on ", stream, ", where the memory may have been in use before");
  }
  std::string tensor;
  if (access.type != at::ScalarType::Undefined) {
    tensor = c10::str(" ", access.type, " ", at::IntArrayRef(access.shape));
  }
  return c10::str(
      access.what, access.writes ? " writes" : " reads", tensor, " on ", stream,
      access.place ? access.place->describe() : "");
}

[[noreturn]] void fail_on_race(const Access& before, const Access& now) {
  const std::string first = name_of(*before.stream);
  const std::string second = name_of(*now.stream);
  TORCH_CHECK(
      false, "race on virtual:", static_cast<int>(now.stream->device),
      ": nothing orders two uses of the same memory\n  first: ", describe(before),
      "\n  then:  ", describe(now), "\n  Let ", second, " wait for ", first,
      " between the two: stream.wait_stream(other), or event.record(other) and event.wait(stream)");
}

[[noreturn]] void fail_on_host(const Access& before, const Access& now) {
  TORCH_CHECK(
      false, "race on the host: nothing orders two uses of the same pinned memory\n  first: ",
      describe(before), "\n  then:  ", describe(now), "\n  Let the host wait for ",
      name_of(*before.stream), " between the two: stream.synchronize(), or event.synchronize()");
}

[[noreturn]] void fail_on_free(const Stream& owner, const Access& use, const Place& place) {
  TORCH_CHECK(
      false, "race on virtual:", static_cast<int>(owner.device),
      ": memory was freed while another stream may still use it, and can be handed out again"
      "\n  first: ", describe(use), "\n  freed: the memory, which belongs to ",
      name_of(owner), place.describe(), "\n  Before the last reference to the tensor goes, "
      "call tensor.record_stream(stream) with ", name_of(*use.stream), ", or let ",
      name_of(owner), " wait for it");
}

// Find an earlier access with which one of these races, and that one; else both have no stream.
std::pair<Access, Access> find_race(Stream& stream, const Accesses& accesses) {
  for (const auto& [block, now] : accesses) {
    for (const Access& before : block->accesses) {
      if ((before.writes || now.writes) && !(before.partial && now.partial) &&
          !is_before(before, stream) && overlap(before.region, now.region)) {
        return {before, now};
      }
    }
  }
  return {};
}

void keep(Stream& stream, Used& block, Access now) {
  now.stream = &stream;
  now.epoch = stream.progress.last_access = stream.progress.epoch;
  auto& kept = block.accesses;
  // An access that comes after this one comes after those, too.
  const auto is_replaced = [&](const Access& before) {
    return is_past(before) ||
        (is_before(before, stream) && !now.partial && (now.writes || !before.writes) &&
         contains(now.region, before.region));
  };
  kept.erase(std::remove_if(kept.begin(), kept.end(), is_replaced), kept.end());
  if (kept.size() >= kMostAccesses) {
    kept.erase(kept.begin());
  }
  kept.push_back(std::move(now));
  block.is_used = true;
}

}  // namespace

void settle(Stream& stream, const Accesses& accesses) {
  raise_late();
  std::pair<Access, Access> race;
  {
    std::lock_guard<std::mutex> lock(clocks_mutex());
    race = find_race(stream, accesses);
    if (race.first.stream == nullptr) {
      for (const auto& [block, access] : accesses) {
        keep(stream, *block, access);
      }
    }
  }
  if (race.first.stream != nullptr) {
    race.second.stream = &stream;
    fail_on_race(race.first, race.second);
  }
}

void raise_later(LateError error) {
  std::lock_guard<std::mutex> lock(clocks_mutex());
  late_errors().push_back(std::move(error));
  has_late = true;
}

void raise_late() {
  if (is_hardware || !has_late) {
    return;
  }
  std::vector<LateError> errors;
  {
    std::lock_guard<std::mutex> lock(clocks_mutex());
    errors.swap(late_errors());
    has_late = false;
  }
  if (!errors.empty()) {
    errors.front().raise();
  }
}

bool overlap(const Region& one, const Region& other) {
  if (one.begin >= other.end || other.begin >= one.end) {
    return false;
  }
  if ((one.sizes.empty() && other.sizes.empty()) || contains(one, other) || contains(other, one)) {
    return true;
  }
  const auto mine = pieces_of(one);
  const auto others = pieces_of(other);
  for (size_t i = 0, j = 0; i < mine.size() && j < others.size();) {
    if (mine[i].second <= others[j].first) {
      ++i;
    } else if (others[j].second <= mine[i].first) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

bool checks_races() noexcept {
  return races_flag.load(std::memory_order_relaxed);
}

void set_checks_races(bool value) {
  if (value && !checks_races()) {
    // Work that was launched while nobody checked counts as ordered.
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
      for_each_stream(index, [](Stream& stream) {
        std::lock_guard<std::mutex> lock(clocks_mutex());
        stream.progress.seen_by_host = stream.progress.epoch++;
      });
    }
  }
  races_flag.store(value);
  if (!value) {
    std::lock_guard<std::mutex> lock(clocks_mutex());
    std::erase_if(late_errors(), [](const LateError& each) { return each.is_race; });
    has_late = !late_errors().empty();
  }
}

Clock mark(Stream& stream) {
  std::lock_guard<std::mutex> lock(clocks_mutex());
  Clock clock = stream.progress.seen;
  join(clock, {{&stream, stream.progress.epoch}});
  ++stream.progress.epoch;
  return clock;
}

void follow(Stream& stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(clocks_mutex());
  join(stream.progress.seen, clock);
}

void host_saw(const Clock& clock) {
  if (is_hardware || clock.empty()) {
    return;
  }
  std::lock_guard<std::mutex> lock(clocks_mutex());
  for (const auto& [stream, epoch] : clock) {
    stream->progress.seen_by_host = std::max(stream->progress.seen_by_host, epoch);
  }
}

void Launch::use(const at::Tensor& tensor, bool writes, bool partial) {
  if (!is_virtual(tensor) || tensor.is_nested()) {
    return;
  }
  if (C10_UNLIKELY(tensor.is_sparse())) {
    add(tensor._indices(), false, false);
    add(tensor._values(), false, false);
  } else {
    add(tensor, writes, partial);
  }
}

void Launch::copies(const at::Tensor& tensor, bool writes) {
  if (is_virtual(tensor)) {
    use(tensor, writes);
  } else if (is_pinned(tensor.storage().data_ptr().get())) {
    watch_host();
    add(tensor, writes, false);
  }
}

void Launch::add(const at::Tensor& tensor, bool writes, bool partial) {
  auto [memory, region] = memory_of(tensor);
  if (!memory) {
    return;
  }
  if (!place_) {
    place_ = Place::here();
  }
  Access access = access_of(tensor, std::move(region), writes, what_);
  access.partial = partial;
  access.place = place_;
  accesses_.emplace_back(std::move(memory), std::move(access));
}

void Launch::check() {
  if (accesses_.empty()) {
    return;
  }
  if (Graph* graph = stream_.graph()) {
    graph->add(accesses_);
  } else {
    settle(stream_, accesses_);
  }
  accesses_.clear();
}

void Launch::made(const at::Tensor& tensor) {
  if (!is_virtual(tensor) || tensor.is_sparse() || tensor.is_nested()) {
    return;
  }
  const auto block = block_of(tensor.storage().data_ptr());
  if (block && !block->is_used.exchange(true)) {
    use(tensor, true);
    for (auto& [_, access] : accesses_) {
      access.region = {};
      access.region.end = static_cast<int64_t>(block->nbytes);
    }
    check();
  }
}

void note_allocation(Block& block) {
  Stream& owner = block.owner;
  block.is_of_graph = owner.capturing();
  std::lock_guard<std::mutex> lock(clocks_mutex());
  if (!block.is_of_graph && owner.progress.last_access > owner.progress.seen_by_host) {
    Access access;
    access.stream = &owner;
    access.epoch = owner.progress.last_access;
    access.writes = true;
    access.region.end = static_cast<int64_t>(block.nbytes);
    block.accesses.push_back(std::move(access));
  }
}

void note_free(const Block& block) {
  if (block.is_of_graph) {
    return;
  }
  Access use;
  {
    std::lock_guard<std::mutex> lock(clocks_mutex());
    for (const Access& access : block.accesses) {
      // Accesses before the work of a recorded stream are awaited with that work.
      const auto is_awaited = [&](const Stream* user) { return is_before(access, *user); };
      if (!is_before(access, block.owner) &&
          std::none_of(block.users.begin(), block.users.end(), is_awaited)) {
        use = access;
      }
    }
  }
  if (use.stream != nullptr) {
    raise_later({[&owner = block.owner, use, place = Place::here()] {
      fail_on_free(owner, use, *place);
    }});
  }
}

void host_uses(const at::Tensor& tensor, bool writes, const char* what) {
  auto [memory, region] = memory_of(tensor);
  if (!memory) {
    return;
  }
  Access now = access_of(tensor, std::move(region), writes, what);
  Access before;
  {
    std::lock_guard<std::mutex> lock(clocks_mutex());
    for (const Access& each : memory->accesses) {
      if ((each.writes || writes) && !is_past(each) && overlap(each.region, now.region)) {
        before = each;
      }
    }
  }
  if (before.stream != nullptr) {
    now.place = Place::here();
    raise_later({[before, now] { fail_on_host(before, now); }});
  }
}

// The host has not seen what such a thread waits for.
void act_as_hardware() {
  is_hardware = true;
}

// Backends of collectives, which are extensions of their own, call it.
TORCH_LIBRARY(dataparallel_virtual, library) {
  library.def("act_as_hardware() -> ()", &act_as_hardware);
}

}  // namespace vdev
