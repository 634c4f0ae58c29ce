// Pinned host memory. Nothing is page-locked; it matters only for which copies may run late.
#include "alias.h"
#include "fallback.h"

#include <ATen/core/TensorBody.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <shared_mutex>

namespace vdev {
namespace {

struct PinnedBlock final : Used {
  c10::DataPtr memory;
  size_t nbytes = 0;
};
using PinnedRef = c10::intrusive_ptr<PinnedBlock>;

// The blocks in order of address, to find the one that an interior pointer belongs to.
struct PinnedRegistry {
  std::shared_mutex mutex;
  std::map<const char*, PinnedRef> blocks;
};

PinnedRegistry& registry() {
  static auto* instance = new PinnedRegistry();
  return *instance;
}

PinnedRef find_pinned(const void* data) {
  if (in_forked_child()) {
    return {};
  }
  const auto* address = static_cast<const char*>(data);
  std::shared_lock<std::shared_mutex> lock(registry().mutex);
  auto after = registry().blocks.upper_bound(address);
  if (after == registry().blocks.begin()) {
    return {};
  }
  const auto& [begin, block] = *--after;
  return address < begin + block->nbytes ? block : PinnedRef();
}

void release_pinned(void* data) {
  if (in_forked_child()) {
    return;
  }
  PinnedRef released;
  std::unique_lock<std::shared_mutex> lock(registry().mutex);
  const auto found = registry().blocks.find(static_cast<const char*>(data));
  released = std::move(found->second);
  registry().blocks.erase(found);
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    check_not_forked();
    auto block = c10::make_intrusive<PinnedBlock>();
    block->nbytes = std::max<size_t>(nbytes, 1);
    block->memory = c10::GetCPUAllocator()->allocate(block->nbytes);
    void* data = block->memory.get();
    std::unique_lock<std::shared_mutex> lock(registry().mutex);
    registry().blocks[static_cast<const char*>(data)] = std::move(block);
    return c10::DataPtr(data, data, &release_pinned, c10::Device(c10::kCPU));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release_pinned;
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

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() &&
      !tensor.key_set().has(c10::DispatchKey::Python);
}

// Torch reports each operator that a program calls. Only those that the CPU runs matter here.
std::unique_ptr<at::ObserverContext> look_at_call(const at::RecordFunction& call) {
  if (!checks_races() || KernelScope::is_inside()) {
    return nullptr;
  }
  bool on_host = true;
  bool pinned = false;
  for (const auto& input : call.inputs()) {
    on_host &= !input.isDevice() || input.toDevice().is_cpu();
    visit_tensors(input, [&](const at::Tensor& tensor) {
      on_host &= tensor.is_cpu() && is_plain(tensor);
      pinned = pinned || (on_host && is_pinned(tensor.storage().data_ptr().get()));
    });
  }
  const auto name = call.operator_name();
  const auto op = on_host && pinned && name.has_value()
      ? c10::Dispatcher::singleton().findSchema(*name)
      : std::nullopt;
  if (!op.has_value()) {
    return nullptr;
  }
  const OperatorInfo& info = info_of(*op);
  if (!info.is_view && !info.is_composite && !info.reads_nothing) {
    for (const auto& each : info.tensors) {
      visit_tensors(call.inputs()[static_cast<size_t>(each.index)], [&](const at::Tensor& tensor) {
        host_uses(tensor, each.writes, info.name.c_str());
      });
    }
  }
  return nullptr;
}

}  // namespace

at::HostAllocator& pinned_allocator() {
  static auto* instance = new PinnedAllocator();
  return *instance;
}

bool is_pinned(const void* data) {
  return find_pinned(data) != nullptr;
}

std::pair<c10::intrusive_ptr<Used>, int64_t> pinned_block_of(const at::Tensor& tensor) {
  const auto* data = static_cast<const char*>(tensor.storage().data_ptr().get());
  PinnedRef block = find_pinned(data);
  const int64_t offset = block ? data - static_cast<const char*>(block->memory.get()) : 0;
  return {std::move(block), offset};
}

void watch_host() {
  static const auto handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&look_at_call).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  (void)handle;
}

namespace {

at::HostAllocatorRegistry<c10::DeviceType::PrivateUse1> register_host_allocator(
    &pinned_allocator());

}  // namespace
}  // namespace vdev
