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
// may use it after it was freed; work on other streams may not, unless the stream was recorded.
struct Block final : Used {
  Block(c10::DataPtr memory, size_t nbytes, Stream& owner)
      : memory(std::move(memory)), nbytes(nbytes), owner(owner) {}
  ~Block() override;

  void record(Stream& stream);
  // Its tensor has gone; only queued work keeps it in existence.
  void retire();

  c10::DataPtr memory;
  size_t nbytes;
  Stream& owner;
  std::mutex mutex;
  std::vector<Stream*> users;
  // A graph has memory of its own.
  bool is_of_graph = false;

 private:
  bool retired_ = false;
};
using BlockRef = c10::intrusive_ptr<Block>;

// The pattern is a NaN as half, bfloat16, float and double, and a large odd number as an integer.
void poison(void* data, size_t nbytes) noexcept;

// Whether queued work keeps so much memory of gone tensors that it should run now.
bool holds_too_much(c10::DeviceIndex device) noexcept;

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t nbytes);
// Makes memory that a CPU kernel has filled belong to a device, without a copy.
c10::DataPtr adopt_memory(c10::DataPtr memory, size_t nbytes, c10::DeviceIndex device);

// Null for memory that this allocator has not made.
BlockRef block_of(const c10::DataPtr& data);
// The same memory for the CPU, which keeps the block in existence. That is not a use of it that a
// stream would know of: once freed, it may be poisoned.
c10::DataPtr host_view(const c10::DataPtr& data);

// Keeps the contents, as far as they fit.
void resize_storage(const c10::Storage& storage, size_t nbytes);

// Free and total bytes. Every device counts the memory of the host as its own, up to its limit.
std::pair<size_t, size_t> memory_info(c10::DeviceIndex device);

// What would make a device hold more bytes raises an OutOfMemoryError; nullopt is no limit.
void set_memory_limit(c10::DeviceIndex device, std::optional<int64_t> bytes);

c10::DeviceAllocator& allocator();

// Pinned host memory: ordinary memory that is known to be pinned.
at::HostAllocator& pinned_allocator();
bool is_pinned(const void* data);
// Null for other memory of the host; and where in it the tensor's storage begins.
std::pair<c10::intrusive_ptr<Used>, int64_t> pinned_block_of(const at::Tensor& tensor);
// From now on, the operators of the CPU are checked for races with streams.
void watch_host();

}  // namespace vdev
