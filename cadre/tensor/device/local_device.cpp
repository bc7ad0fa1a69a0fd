#include "cadre/tensor/device/local_device.h"

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/device/device_runtime.h"

namespace cadre {
namespace {

int local_rank() {
  const char* const text = std::getenv("LOCAL_RANK");
  if (text == nullptr) return 0;
  const std::string_view digits(text);
  int rank = -1;
  const auto [end, failure] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (failure == std::errc() && end == digits.data() + digits.size() && rank >= 0) return rank;
  throw Error(ErrorCode::kInvalidArgument,
              format("local_device: LOCAL_RANK is \"{}\"; cadre run sets it to 0, 1, ...", digits));
}

// Returns whether the kernel has a driver for CUDA devices. Without one the libraries of a torch
// for CUDA, which have 0.5 GB, need not be loaded.
bool has_cuda_driver() {
  std::error_code failure;
  return std::filesystem::exists("/proc/driver/nvidia/version", failure) ||
         std::filesystem::exists("/dev/nvidiactl", failure) ||
         std::filesystem::exists("/dev/dxg", failure);  // Windows Subsystem for Linux
}

// Returns the device; the CPU with the reason if the search came too late to find one.
struct LocalDevice {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  std::string why_late = {};
};

LocalDevice search() {
  if (!has_cuda_driver()) return {};
  const int rank = local_rank();
  const device::FoundDevices found = device::find_devices(c10::DeviceType::CUDA);
  if (found.was_late) return {.why_late = found.reason};
  if (!found.runtime) return {};
  const int index = rank % found.runtime->num_devices();
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
  found.runtime->make_current(device);
  return {.device = device};
}

}  // namespace

c10::Device local_device() {
  const LocalDevice found = search();
  if (!found.why_late.empty()) throw Error(ErrorCode::kUnavailable, found.why_late);
  return found.device;
}

c10::Device device::default_device() {
  return search().device;
}

}  // namespace cadre
