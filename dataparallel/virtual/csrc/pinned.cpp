// Pinned host memory. Nothing is really page-locked; what matters is which copies may read late.
#include "memory.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <shared_mutex>

namespace vdev {
namespace {

// Ordered by address, to find the block that an interior pointer belongs to.
struct PinnedRegistry {
  std::shared_mutex mutex;
  std::map<const char*, size_t> blocks;
};

PinnedRegistry& registry() {
  static auto* instance = new PinnedRegistry();
  return *instance;
}

struct PinnedBlock {
  c10::DataPtr memory;
};

void release_pinned(void* context) {
  auto* block = static_cast<PinnedBlock*>(context);
  if (in_forked_child()) {
    return;
  }
  {
    std::unique_lock<std::shared_mutex> lock(registry().mutex);
    registry().blocks.erase(static_cast<const char*>(block->memory.get()));
  }
  delete block;
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    check_not_forked();
    auto block = std::make_unique<PinnedBlock>();
    block->memory = c10::GetCPUAllocator()->allocate(std::max<size_t>(nbytes, 1));
    void* data = block->memory.get();
    {
      std::unique_lock<std::shared_mutex> lock(registry().mutex);
      registry().blocks[static_cast<const char*>(data)] = std::max<size_t>(nbytes, 1);
    }
    return c10::DataPtr(data, block.release(), &release_pinned, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool record_event(void* /*ptr*/, void* /*context*/, c10::Stream /*stream*/) override {
    return true;  // Queued copies own their host memory.
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

at::HostAllocator& pinned_allocator() {
  static auto* instance = new PinnedAllocator();
  return *instance;
}

bool is_pinned(const void* data) {
  if (in_forked_child()) {
    return false;
  }
  const auto* address = static_cast<const char*>(data);
  std::shared_lock<std::shared_mutex> lock(registry().mutex);
  auto after = registry().blocks.upper_bound(address);
  if (after == registry().blocks.begin()) {
    return false;
  }
  --after;
  return address < after->first + after->second;
}

namespace {
at::HostAllocatorRegistry<c10::DeviceType::PrivateUse1> register_host_allocator(
    &pinned_allocator());
}

}  // namespace vdev
