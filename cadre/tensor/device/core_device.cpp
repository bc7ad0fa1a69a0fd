#include "cadre/tensor/device/core_device.h"

namespace cadre::device {

std::optional<Device> to_core(const c10::Device& device) {
  const int index = device.has_index() ? device.index() : 0;
  switch (device.type()) {
    case c10::DeviceType::CPU:
      return Device{DeviceType::kCpu, 0};
    case c10::DeviceType::CUDA:
      return Device{DeviceType::kCuda, index};
    case c10::DeviceType::PrivateUse1:
      return Device{DeviceType::kPrivateUse1, index};
    default:
      return std::nullopt;
  }
}

c10::Device to_c10(const Device& device) {
  const auto index = static_cast<c10::DeviceIndex>(device.index);
  switch (device.type) {
    case DeviceType::kCpu:
      break;
    case DeviceType::kCuda:
      return {c10::DeviceType::CUDA, index};
    case DeviceType::kPrivateUse1:
      return {c10::DeviceType::PrivateUse1, index};
  }
  return c10::Device(c10::DeviceType::CPU);
}

}  // namespace cadre::device
