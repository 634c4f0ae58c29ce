// The interface through which torch selects devices and streams and records events.
#include "memory.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace vdev {
namespace {

struct Event {
  std::mutex mutex;
  std::shared_ptr<Record> record;

  std::shared_ptr<Record> latest() {
    std::lock_guard<std::mutex> lock(mutex);
    return record;
  }
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override {
    return device_at(current_device());
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == type(), "expected a virtual device, got ", device);
    set_current_device(checked_index(device.index()));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(c10::Device device) const override {
    return handle_of(current_stream(checked_index(device.index())));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return handle_of(stream_at(checked_index(device.index()), 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/ = false) const override {
    return handle_of(pooled_stream(checked_index(device.index())));
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/ = 0) const override {
    return handle_of(new_stream(checked_index(device.index())));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    Stream& previous = current_stream(stream.device_index());
    set_current_stream(stream_of(stream));
    return handle_of(previous);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Stream& asked = stream_of(stream);
    const Clock clock = checks_races() ? mark(asked) : Clock();
    const bool done = asked.poll();
    if (done) {
      host_saw(clock);
    }
    return done;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count(stream.device_index(), kHostWaits);
    host_waits_for(stream_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    count(checked_index(index), kHostWaits);
    synchronize_device(checked_index(index));
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex device_index,
      const c10::EventFlag flag) const override {
    TORCH_CHECK(
        device_index == -1 || device_index == stream.device_index(),
        "an event of virtual:", static_cast<int>(device_index),
        " cannot be recorded on a stream of ", stream.device());
    check_not_forked();
    if (*event == nullptr) {
      *event = new Event();
    }
    // Always record the time: not all places that create events pass the same flag.
    (void)flag;
    auto record = stream_of(stream).record(/*timed=*/true);
    auto* mine = static_cast<Event*>(*event);
    std::lock_guard<std::mutex> lock(mine->mutex);
    mine->record = std::move(record);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      stream_of(stream).wait(static_cast<Event*>(event)->latest());
    }
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    const auto record = static_cast<Event*>(event)->latest();
    const bool done = record->poll();
    if (done) {
      host_saw(record->clock);
    }
    return done;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      auto record = static_cast<Event*>(event)->latest();
      count(record->stream.device, kHostWaits);
      if (is_noted()) {
        note_host_wait(record->stream, record->number);
      }
      record->stream.run_until(record->position);
      host_saw(record->clock);
      raise_late();
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(
      void* start, void* end, const c10::DeviceIndex /*index*/) const override {
    TORCH_CHECK(
        start != nullptr && end != nullptr,
        "both events must be recorded before the elapsed time can be computed");
    const double first = static_cast<Event*>(start)->latest()->seconds.load();
    const double last = static_cast<Event*>(end)->latest()->seconds.load();
    TORCH_CHECK(
        first >= 0 && last >= 0,
        "both events must be completed before the elapsed time can be computed");
    return (last - first) * 1e3;
  }

  void recordDataPtrOnStream(
      const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (auto block = block_of(data)) {
      block->record(stream_of(stream));
    }
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace vdev
