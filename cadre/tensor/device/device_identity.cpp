#include "cadre/tensor/device/device_identity.h"

#include <array>
#include <cstdint>

#include "cadre/core/base/format.h"
#include "cadre/core/os/host/host_info.h"
#include "cadre/core/os/process_watcher.h"
#include "cadre/core/os/system.h"
#include "cadre/tensor/device/cudart.h"

namespace cadre::device {
namespace {

// Returns an empty text if the CUDA runtime that libtorch has loaded cannot be found.
std::string pci_address(int index) {
  using PciAddress = int (*)(char* text, int num_bytes, int device);
  std::array<char, 32> text{};
  const auto function = reinterpret_cast<PciAddress>(cudart_function("cudaDeviceGetPCIBusId"));
  if (function == nullptr || function(text.data(), static_cast<int>(text.size()), index) != 0) {
    return {};
  }
  return text.data();
}

}  // namespace

DeviceIdentity identity_of(const Device& device, os::System& system) {
  const os::HostInfo host = system.host();
  auto* const watcher = dynamic_cast<os::ProcessWatcher*>(&system);
  const uint64_t pids = watcher == nullptr ? 0 : watcher->pid_namespace();
  std::string name = format("process {}/{}", host.pid, to_string(device));
  std::string key = format("{}/{}", pids, name);  // a pid is that of one process of its namespace
  if (device.type == DeviceType::kCuda) {
    const std::string address = pci_address(device.index);
    name = address.empty() ? to_string(device) : address;
    key = name;
  }
  return {.name = format("{}/{}", host.name, name),
          .key = format("{}/{}", os::kernel_boot_id(), key)};
}

}  // namespace cadre::device
