// Device memory: blocks of host memory that follow the lifetime rules of a caching allocator.
#pragma once

#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <vector>

namespace vdev {

// A block belongs to the stream that was current when it was allocated. Work queued on that stream
// may use it after it was freed; work on other streams may not, unless their use was recorded.
struct Block final : Used {
  Block(c10::DataPtr memory, size_t nbytes, Stream& owner)
      : memory(std::move(memory)), nbytes(nbytes), owner(owner) {}
  ~Block() override;

  void record(Stream& stream);
  // Note that the tensor has gone: from now on only queued work keeps the block in existence.
  void retire();

  c10::DataPtr memory;
  size_t nbytes;
  Stream& owner;
  std::mutex mutex;
  std::vector<Stream*> users;
  // True if a graph allocated it: graphs have memory of their own.
  bool is_of_graph = false;

 private:
  bool retired_ = false;
};
using BlockRef = c10::intrusive_ptr<Block>;

// Fill memory with a NaN in half, bfloat16, float and double, which is a large odd integer.
void poison(void* data, size_t nbytes) noexcept;

// True if queued work keeps so much memory of gone tensors that it should run now.
bool holds_too_much(c10::DeviceIndex device) noexcept;

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes);
// Make memory that a CPU kernel has filled belong to a device, without a copy.
c10::DataPtr adopt_memory(c10::DataPtr memory, size_t nbytes, c10::DeviceIndex device);

// Return the block of this memory; null if this allocator has not made it.
BlockRef block_of(const c10::DataPtr& data);
// Return the same memory for the CPU, which keeps the block in existence. Streams do not count that
// as a use: once freed, the memory may be poisoned.
c10::DataPtr host_view(const c10::DataPtr& data);

// Resize a storage, and keep the contents as far as they fit.
void resize_storage(const c10::Storage& storage, size_t nbytes);

// Return free and total bytes. Every device counts the host's memory as its own, up to its limit.
std::pair<size_t, size_t> memory_info(c10::DeviceIndex device);

// Set the most bytes that a device may hold before it raises an OutOfMemoryError; nullopt: any.
void set_memory_limit(c10::DeviceIndex device, std::optional<int64_t> bytes);

c10::DeviceAllocator& allocator();

// Return the allocator of pinned host memory: ordinary memory that is known to be pinned.
at::HostAllocator& pinned_allocator();
bool is_pinned(const void* data);
// Return a tensor's block of pinned memory, null for other memory, and where its storage begins.
std::pair<c10::intrusive_ptr<Used>, int64_t> pinned_block_of(const at::Tensor& tensor);
// Check the operators of the CPU for races with streams from now on.
void watch_host();

}  // namespace vdev
