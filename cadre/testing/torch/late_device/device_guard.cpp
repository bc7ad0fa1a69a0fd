// The device guard, by which c10 reaches devices, streams and events, and the hooks, by which ATen
// reaches generators and pinned memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "cadre/testing/torch/late_device/generators.h"
#include "cadre/testing/torch/late_device/runtime.h"

namespace cadre::testing::late {
namespace {

using EventPointer = std::shared_ptr<Event>;

c10::Stream make_stream(int device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, late_device_of(device), id);
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

class Guard : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kLateType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kNumDevices, device,
                " does not exist: the late devices are late:0 to late:", kNumDevices - 1);
    return late_device_of(exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return late_device_of(current_device()); }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return make_stream(index_of(device), current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device,
                                      bool /*is_high_priority*/) const override {
    return getNewStream(device, 0);
  }
  // The next of the pool, in turn. Priorities have no effect.
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    const int index = index_of(device);
    const unsigned turn = turns_.at(static_cast<size_t>(index))++;
    return make_stream(index, 1 + static_cast<int>(turn % (kNumStreams - 1)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = stream.device_index();
    return make_stream(device, exchange_stream(device, static_cast<int>(stream.id())));
  }
  // The address of the stream's queue; see enqueue_native() in late_device.h.
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    runtime().counters.add_wait(stream.device_index());
    queue_of(stream).synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    runtime().counters.add_wait(device);
    runtime().streams.synchronize(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex /*device*/,
              const c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = std::make_unique<EventPointer>().release();
    *static_cast<EventPointer*>(*event) = queue_of(stream).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) queue_of(stream).wait_event(*static_cast<EventPointer*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || (*static_cast<EventPointer*>(event))->is_set();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const EventPointer& recorded = *static_cast<EventPointer*>(event);
    runtime().counters.add_wait(recorded->stream()->device());
    TORCH_CHECK(recorded->wait_for(kWaitLimit), "an event of ", recorded->stream()->name(),
                " has not happened within ", kWaitLimit.count(), " s: release the stream's holds");
    recorded->stream()->throw_failure();
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    const std::unique_ptr<EventPointer> owned(static_cast<EventPointer*>(event));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex /*device*/) const override {
    const Event& begin = **static_cast<EventPointer*>(from);
    const Event& end = **static_cast<EventPointer*>(to);
    TORCH_CHECK(
        begin.is_set() && end.is_set(),
        "late device: elapsedTime() of an event that has not happened: synchronize it first");
    return std::chrono::duration<double, std::milli>(end.time() - begin.time()).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    runtime().allocator.recordStream(data, stream);
  }

 private:
  mutable std::array<std::atomic<unsigned>, kNumDevices> turns_{};
};

// `override` is left out, because older versions of torch lack this function.
class CapturingGuard final : public Guard {
 public:
  bool isStreamCapturing(const c10::Stream& stream) const { return queue_of(stream).is_capturing; }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  // Autograd forgets the stream of backward()'s caller if this returns false.
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return runtime().pinned.contains(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &runtime().pinned; }
  c10::Device getDeviceFromPtr(void* data) const override {
    const int device = runtime().memory.device_of(data);
    TORCH_CHECK(device >= 0, "late device: ", data, " is not an address of a late device");
    return late_device_of(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*device*/) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(impl.device());
    c10::DataPtr data = runtime().allocator.allocate(num_bytes);
    const size_t num_kept = std::min(num_bytes, impl.nbytes());
    if (num_kept > 0) {
      char* const to = runtime().memory.host_address(data.get());
      const char* const from = runtime().memory.host_address(impl.data());
      runtime().counters.add_kernel(impl.device().index());
      current_queue(impl.device().index())
          .enqueue([to, from, num_kept] { std::memcpy(to, from, num_kept); },
                   StreamQueue::TaskKind::kKernel);
    }
    impl.set_data_ptr_noswap(std::move(data));
    impl.set_nbytes(num_bytes);
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  // libtorch's hooks return references to generators that exist until the process ends.
  static const auto& generators = *std::make_unique<std::array<at::Generator, kNumDevices>>([] {
                                     std::array<at::Generator, kNumDevices> made;
                                     for (auto& one : made) one = at::detail::createCPUGenerator();
                                     return made;
                                   }())
                                       .release();
  return generators.at(static_cast<size_t>(device));
}

at::Generator generator_of_call(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  auto* const impl = at::check_generator<at::CPUGeneratorImpl>(generator);
  return at::make_generator<at::CPUGeneratorImpl>(impl->random64());
}

void register_guard_and_hooks() {
  // libtorch keeps both until the process ends.
  c10::impl::registerDeviceGuard(kLateType, std::make_unique<CapturingGuard>().release());
  at::RegisterPrivateUse1HooksInterface(std::make_unique<Hooks>().release());
}

}  // namespace cadre::testing::late
