#include "memory.h"

#include <c10/core/CPUAllocator.h>

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace vdev {
namespace {

// A loop that never waits would otherwise keep everything it has ever computed.
constexpr int64_t kMaxRetiredBytes = int64_t{1} << 30;

// The limit of a device that has none.
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

struct alignas(64) Usage {
  std::atomic<int64_t> limit{kUnlimited};
  std::atomic<int64_t> retired_bytes{0};
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> peak_bytes{0};
  // Bytes of tensors, and of freed blocks that recorded streams may still use.
  std::atomic<int64_t> active_bytes{0};
  std::atomic<int64_t> peak_active_bytes{0};
  // Those bytes, and the ones that streams keep to hand out again.
  std::atomic<int64_t> reserved_bytes{0};
  std::atomic<int64_t> peak_reserved_bytes{0};
  std::atomic<int64_t> retries{0};
  std::atomic<int64_t> blocks{0};
  std::atomic<int64_t> peak_blocks{0};
  std::atomic<int64_t> bytes_ever{0};
  std::atomic<int64_t> blocks_ever{0};
  std::atomic<int64_t> bytes_freed{0};
  std::atomic<int64_t> blocks_freed{0};
};
std::array<Usage, kMaxDevices> usages;

void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (seen < value && !peak.compare_exchange_weak(seen, value)) {
  }
}

void release_cached(c10::DeviceIndex device) {
  for_each_stream(device, [&](Stream& stream) {
    usages[static_cast<size_t>(device)].reserved_bytes.fetch_sub(stream.cached_bytes.exchange(0));
  });
}

// Memory that the owner has freed is handed out first, however it is divided into blocks.
void account_reserved(Stream& owner, int64_t amount) {
  Usage& usage = usages[static_cast<size_t>(owner.device)];
  raise_to(usage.peak_active_bytes, usage.active_bytes.fetch_add(amount) + amount);
  int64_t cached = owner.cached_bytes.load();
  while (!owner.cached_bytes.compare_exchange_weak(cached, cached - std::min(cached, amount))) {
  }
  const int64_t added = amount - std::min(cached, amount);
  if (usage.reserved_bytes.fetch_add(added) + added > usage.limit.load()) {
    release_cached(owner.device);
    usage.retries.fetch_add(1);
  }
  raise_to(usage.peak_reserved_bytes, usage.reserved_bytes.load());
}

void account_inactive(Stream& owner, size_t nbytes) {
  const auto amount = static_cast<int64_t>(nbytes);
  usages[static_cast<size_t>(owner.device)].active_bytes.fetch_sub(amount);
  owner.cached_bytes.fetch_add(amount);
}

void account_allocation(Stream& owner, size_t nbytes) {
  const auto amount = static_cast<int64_t>(nbytes);
  const c10::DeviceIndex device = owner.device;
  Usage& usage = usages[static_cast<size_t>(device)];
  const int64_t bytes = usage.bytes.fetch_add(amount) + amount;
  const int64_t limit = usage.limit.load(std::memory_order_relaxed);
  if (bytes > limit) {
    usage.bytes.fetch_sub(amount);
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "virtual:", static_cast<int>(device),
        " is out of memory. Tried to allocate ", amount, " bytes; ", bytes - amount,
        " are in use, and dataparallel.virtual.set_memory_limit allows ", limit, ".");
  }
  account_reserved(owner, amount);
  raise_to(usage.peak_bytes, bytes);
  raise_to(usage.peak_blocks, usage.blocks.fetch_add(1) + 1);
  usage.bytes_ever.fetch_add(amount, std::memory_order_relaxed);
  usage.blocks_ever.fetch_add(1, std::memory_order_relaxed);
  count(device, kAllocations);
  count(device, kAllocatedBytes, amount);
}

void account_free(c10::DeviceIndex device, size_t nbytes) {
  const auto amount = static_cast<int64_t>(nbytes);
  Usage& usage = usages[static_cast<size_t>(device)];
  usage.bytes.fetch_sub(amount);
  usage.blocks.fetch_sub(1);
  usage.bytes_freed.fetch_add(amount, std::memory_order_relaxed);
  usage.blocks_freed.fetch_add(1, std::memory_order_relaxed);
}

// Memory from which the system hands out pages when they are touched, and of which small pieces
// are zeroed: nothing runs in dry mode that would write it.
constexpr size_t kReservedFrom = size_t{1} << 16;

struct Reserved {
  void* data;
  size_t nbytes;
};

c10::DataPtr reserve(size_t nbytes) {
  if (nbytes < kReservedFrom) {
    c10::DataPtr small = c10::GetCPUAllocator()->allocate(nbytes);
    std::memset(small.get(), 0, nbytes);
    return small;
  }
  void* data = mmap(
      nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "the system does not reserve ", nbytes, " bytes of memory");
  const auto unmap = [](void* context) {
    const auto* reserved = static_cast<Reserved*>(context);
    munmap(reserved->data, reserved->nbytes);
    delete reserved;
  };
  return c10::DataPtr(data, new Reserved{data, nbytes}, unmap, c10::Device(c10::kCPU));
}

// A block whose tensor has gone, until its streams have passed that moment.
struct Retirement {
  Retirement(BlockRef block, size_t streams) : block(std::move(block)), remaining(streams) {}
  BlockRef block;
  std::atomic<size_t> remaining;
};

class RetireTask final : public Task {
 public:
  explicit RetireTask(std::shared_ptr<Retirement> retirement)
      : retirement_(std::move(retirement)) {}
  void run() override {
    if (retirement_->remaining.fetch_sub(1) != 1) {
      return;
    }
    Block& block = *retirement_->block;
    // Work that still refers to the block now is queued on a stream that had no right to it.
    if (retirement_->block.use_count() > 1 && !is_dry()) {
      poison(block.memory.get(), block.nbytes);
    }
    if (!block.users.empty()) {
      account_inactive(block.owner, block.nbytes);
    }
  }
  std::string name() const override {
    return "free";
  }

 private:
  std::shared_ptr<Retirement> retirement_;
};

void release_block(void* context) {
  auto block = BlockRef::reclaim(static_cast<Block*>(context));
  if (in_forked_child()) {
    block.release();
    return;
  }
  account_free(block->owner.device, block->nbytes);
  if (is_noted()) {
    note_block("free", *block, block->owner);
  }
  if (checks_races()) {
    note_free(*block);
  }
  std::vector<Stream*> streams;
  {
    std::lock_guard<std::mutex> lock(block->mutex);
    streams = block->users;
  }
  if (streams.empty()) {
    account_inactive(block->owner, block->nbytes);
    if (block.use_count() == 1) {
      return;  // Nothing queued refers to it.
    }
  }
  streams.push_back(&block->owner);
  block->retire();
  auto retirement = std::make_shared<Retirement>(std::move(block), streams.size());
  for (Stream* stream : streams) {
    stream->submit_marker(std::make_unique<RetireTask>(retirement));
  }
}

c10::CachingAllocator::Stat stat(int64_t now, int64_t peak, int64_t ever, int64_t freed) {
  c10::CachingAllocator::Stat result;
  result.current = now;
  result.peak = peak;
  result.allocated = ever;
  result.freed = freed;
  return result;
}

class VirtualAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    return allocate_on(current_device(), nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;  // The context is not the data pointer.
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool initialized() override {
    return device_count() > 0;
  }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
      release_cached(device);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (auto block = block_of(data)) {
      block->record(stream_of(stream));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Usage& usage = usages[static_cast<size_t>(checked_index(device))];
    const auto bytes = stat(usage.bytes, usage.peak_bytes, usage.bytes_ever, usage.bytes_freed);
    const auto blocks =
        stat(usage.blocks, usage.peak_blocks, usage.blocks_ever, usage.blocks_freed);
    c10::CachingDeviceAllocator::DeviceStats stats;
    // Only the sum over all pools is told: there are no small and large blocks here.
    stats.allocation[0] = stats.active[0] = stats.segment[0] = blocks;
    stats.allocated_bytes[0] = stats.requested_bytes[0] = bytes;
    stats.active_bytes[0] = stat(usage.active_bytes, usage.peak_active_bytes, 0, 0);
    stats.reserved_bytes[0] = stat(usage.reserved_bytes, usage.peak_reserved_bytes, 0, 0);
    stats.num_alloc_retries = usage.retries;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Usage& usage = usages[static_cast<size_t>(checked_index(device))];
    usage.bytes_ever = usage.blocks_ever = usage.bytes_freed = usage.blocks_freed = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Usage& usage = usages[static_cast<size_t>(checked_index(device))];
    usage.peak_bytes = usage.bytes.load();
    usage.peak_active_bytes = usage.active_bytes.load();
    usage.peak_reserved_bytes = usage.reserved_bytes.load();
    usage.peak_blocks = usage.blocks.load();
  }
  // It is not marked as overriding: older versions of torch do not have it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {
    return memory_info(device);
  }
};

}  // namespace

void poison(void* data, size_t nbytes) noexcept {
  auto* words = static_cast<uint16_t*>(data);
  std::fill(words, words + nbytes / 2, uint16_t{0x7FFB});
  if (nbytes % 2 != 0) {
    static_cast<uint8_t*>(data)[nbytes - 1] = 0xFB;
  }
}

Block::~Block() {
  if (retired_) {
    usages[static_cast<size_t>(owner.device)].retired_bytes.fetch_sub(
        static_cast<int64_t>(nbytes));
  }
}

void Block::retire() {
  retired_ = true;
  usages[static_cast<size_t>(owner.device)].retired_bytes.fetch_add(static_cast<int64_t>(nbytes));
}

bool holds_too_much(c10::DeviceIndex device) noexcept {
  return usages[static_cast<size_t>(device)].retired_bytes.load(std::memory_order_relaxed) >
      kMaxRetiredBytes;
}

void Block::record(Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex);
  if (&stream != &owner && std::find(users.begin(), users.end(), &stream) == users.end()) {
    users.push_back(&stream);
    if (is_noted()) {
      note_block("use", *this, stream);
    }
  }
}

c10::DataPtr adopt_memory(c10::DataPtr memory, size_t nbytes, c10::DeviceIndex device) {
  void* data = memory.get();
  if (data == nullptr) {
    return c10::DataPtr(nullptr, device_at(device));
  }
  auto block = c10::make_intrusive<Block>(std::move(memory), nbytes, current_stream(device));
  if (checks_races()) {
    note_allocation(*block);
  }
  account_allocation(block->owner, nbytes);
  if (is_noted()) {
    note_block("allocate", *block, block->owner);
  }
  return c10::DataPtr(data, block.release(), &release_block, device_at(device));
}

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes) {
  check_not_forked();
  device = checked_index(device);
  if (nbytes == 0) {
    return c10::DataPtr(nullptr, device_at(device));
  }
  if (is_dry()) {
    return adopt_memory(reserve(nbytes), nbytes, device);
  }
  c10::DataPtr memory = c10::GetCPUAllocator()->allocate(nbytes);
  if (current_stream(device).defers()) {
    // Memory that nothing has written yet must not look right by luck.
    poison(memory.get(), nbytes);
  }
  return adopt_memory(std::move(memory), nbytes, device);
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  const c10::DeviceIndex device = storage.device().index();
  c10::DataPtr grown = allocate_on(device, nbytes);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (kept > 0 && !is_dry()) {
    // The old contents may still be on their way.
    current_stream(device).synchronize();
    std::memcpy(grown.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(grown));
  storage.set_nbytes(nbytes);
}

std::pair<size_t, size_t> memory_info(c10::DeviceIndex device) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const Usage& usage = usages[static_cast<size_t>(checked_index(device))];
  const size_t host = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page;
  const size_t total = std::min(host, static_cast<size_t>(usage.limit.load()));
  const auto used = static_cast<size_t>(usage.bytes.load());
  return {total - std::min(used, total), total};
}

void set_memory_limit(c10::DeviceIndex device, std::optional<int64_t> bytes) {
  usages[static_cast<size_t>(checked_index(device))].limit = bytes.value_or(kUnlimited);
}

BlockRef block_of(const c10::DataPtr& data) {
  if (data.get_deleter() != &release_block) {
    return {};
  }
  auto* block = static_cast<Block*>(data.get_context());
  return BlockRef::unsafe_reclaim_from_nonowning(block);
}

c10::DataPtr host_view(const c10::DataPtr& data) {
  BlockRef block = block_of(data);
  if (!block) {
    return c10::DataPtr(data.get(), c10::Device(c10::kCPU));
  }
  return c10::DataPtr(
      data.get(), block.release(),
      [](void* context) { BlockRef::reclaim(static_cast<Block*>(context)); },
      c10::Device(c10::kCPU));
}

c10::DeviceAllocator& allocator() {
  static auto* instance = new VirtualAllocator();
  return *instance;
}

namespace {

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator())

}  // namespace
}  // namespace vdev
