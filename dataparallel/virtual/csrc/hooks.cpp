#include "hooks.h"

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace vdev {
namespace {

class VirtualGenerator final : public c10::GeneratorImpl {
 public:
  VirtualGenerator(c10::DeviceIndex device, at::Generator source)
      : c10::GeneratorImpl(
            device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        source(std::move(source)) {}

  void set_current_seed(uint64_t seed) override {
    std::lock_guard<std::mutex> lock(source.mutex());
    source.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    source.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return source.get_offset();
  }
  uint64_t current_seed() const override {
    std::lock_guard<std::mutex> lock(source.mutex());
    return source.current_seed();
  }
  uint64_t seed() override {
    const uint64_t random = c10::detail::getNonDeterministicRandom();
    set_current_seed(random);
    return random;
  }
  void set_state(const c10::TensorImpl& state) override {
    std::lock_guard<std::mutex> lock(source.mutex());
    source.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    std::lock_guard<std::mutex> lock(source.mutex());
    return source.unsafeGetGeneratorImpl()->get_state();
  }

  mutable at::Generator source;

 protected:
  c10::GeneratorImpl* clone_impl() const override {
    std::lock_guard<std::mutex> lock(source.mutex());
    return new VirtualGenerator(device().index(), source.clone());
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    return index >= 0 && index < device_count();
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device(checked_index(index));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex previous = current_device();
    set_current_device(checked_index(index));
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return make_generator(index);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

}  // namespace

at::Generator make_generator(c10::DeviceIndex device) {
  return at::make_generator<VirtualGenerator>(
      checked_index(device), at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::array<at::Generator, kMaxDevices>();
    for (int index = 0; index < device_count(); ++index) {
      (*made)[static_cast<size_t>(index)] =
          make_generator(static_cast<c10::DeviceIndex>(index));
    }
    return made;
  }();
  return (*generators)[static_cast<size_t>(checked_index(device))];
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == c10::DeviceType::PrivateUse1,
      "Expected a 'virtual' device type for generator but found '", generator.device().type(),
      "'");
  return static_cast<VirtualGenerator*>(generator.unsafeGetGeneratorImpl())->source;
}

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

}  // namespace vdev
