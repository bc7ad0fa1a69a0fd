#include "cadre/tensor/device/device_runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <tuple>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/device/cudart.h"
#include "cadre/tensor/device/device_search.h"

namespace cadre::device {
namespace {

// Versions of torch differ in whether the guard has the function, which is looked up here. In older
// ones the handle of a CUDA stream is what the method stream() of c10::cuda::CUDAStream returns; an
// object of this class has a c10::Stream as its only member.
template <typename Guard>
void* native_handle_of(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  } else {
    using HandleOf = void* (*)(const c10::Stream*);
    void* const method = dlsym(RTLD_DEFAULT, "_ZNK3c104cuda10CUDAStream6streamEv");
    const bool is_cuda = stream.device_type() == c10::DeviceType::CUDA;
    if (is_cuda && method != nullptr) return reinterpret_cast<HandleOf>(method)(&stream);
    throw Error(ErrorCode::kInvalidArgument,
                format("torch {} gives no native handle of a stream of {}: use a later version",
                       TORCH_VERSION, stream.device().str()));
  }
}

template <typename Guard>
bool is_capturing_on(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    return false;
  }
}

// Asks the CUDA runtime, because the guard of CUDA may not know.
template <typename Guard>
bool is_capturing_in_cuda(const Guard& guard, const c10::Stream& stream) {
  using IsCapturing = int (*)(void* stream, int* status);
  const auto function = reinterpret_cast<IsCapturing>(cudart_function("cudaStreamIsCapturing"));
  int status = 0;  // cudaStreamCaptureStatusNone
  return function != nullptr && function(native_handle_of(guard, stream), &status) == 0 &&
         status != 0;
}

const c10::CachingAllocator::Stat& total_of(const c10::CachingAllocator::StatArray& stats) {
  return stats.at(static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE));
}

}  // namespace

c10::DeviceType DeviceRuntime::type() const {
  return guard_->type();
}

int DeviceRuntime::num_devices() const {
  return guard_->deviceCount();
}

c10::Device DeviceRuntime::current_device() const {
  return guard_->getDevice();
}

void DeviceRuntime::make_current(c10::Device device) const {
  check_device(device);
  guard_->setDevice(device);
}

c10::Stream DeviceRuntime::current_stream(c10::Device device) const {
  check_device(device);
  return guard_->getStream(device);
}

c10::Stream DeviceRuntime::pooled_stream(c10::Device device, StreamPriority priority) const {
  check_device(device);
  return guard_->getStreamFromGlobalPool(device, priority == StreamPriority::kHigh);
}

void* DeviceRuntime::native_handle(const c10::Stream& stream) const {
  check_stream(stream);
  return native_handle_of(*guard_, stream);
}

bool DeviceRuntime::is_capturing(const c10::Stream& stream) const {
  check_stream(stream);
  return is_capturing_on(*guard_, stream);
}

bool is_capture_current(c10::Device device) {
  const auto* const guard = c10::impl::getDeviceGuardImpl(device.type());
  const c10::Stream stream = guard->getStream(device);
  return is_capturing_on(*guard, stream) ||
         (device.is_cuda() && is_capturing_in_cuda(*guard, stream));
}

DeviceMemory DeviceRuntime::memory(c10::Device device) const {
  check_device(device);
  auto* const allocator = c10::getDeviceAllocator(type());
  DeviceMemory memory;
  std::tie(memory.free_bytes, memory.total_bytes) = allocator->getMemoryInfo(device.index());
  if (!allocator->initialized()) return memory;
  const auto stats = allocator->getDeviceStats(device.index());
  const auto& reserved = total_of(stats.reserved_bytes);
  const auto& allocated = total_of(stats.allocated_bytes);
  memory.reserved_bytes = static_cast<size_t>(reserved.current);
  memory.allocated_bytes = static_cast<size_t>(allocated.current);
  memory.peak_reserved_bytes = static_cast<size_t>(reserved.peak);
  memory.peak_allocated_bytes = static_cast<size_t>(allocated.peak);
  return memory;
}

void DeviceRuntime::reset_peaks(c10::Device device) const {
  check_device(device);
  auto* const allocator = c10::getDeviceAllocator(type());
  if (allocator->initialized()) allocator->resetPeakStats(device.index());
}

at::HostAllocator* DeviceRuntime::pinned_allocator() const {
  return at::getHostAllocator(type());
}

void DeviceRuntime::check_device(c10::Device device) const {
  if (device.type() == type() && device.index() >= 0 && device.index() < num_devices()) return;
  const std::string name = c10::DeviceTypeName(type(), /*lower_case=*/true);
  throw Error(ErrorCode::kInvalidArgument,
              format("{} is not a device of this process: it has {}:0 to {}:{}", device.str(), name,
                     name, num_devices() - 1));
}

void DeviceRuntime::check_stream(const c10::Stream& stream) const {
  check_device(stream.device());
}

FoundDevices find_devices(c10::DeviceType type) {
  const DeviceFacts facts = search_devices(type);
  FoundDevices found{.runtime = std::nullopt,
                     .reason = why_none(facts),
                     .was_late = facts.num_devices > 0 && !facts.is_known_to_aten};
  if (found.reason.empty()) found.runtime = DeviceRuntime(*facts.guard);
  return found;
}

}  // namespace cadre::device
