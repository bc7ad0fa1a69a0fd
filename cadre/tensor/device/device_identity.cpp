#include "cadre/tensor/device/device_identity.h"

#include <dlfcn.h>

#include <array>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/os/system.h"

namespace cadre::device {
namespace {

// Returns an empty text if the CUDA runtime that libtorch has loaded cannot be found.
std::string pci_address(int index) {
  using PciAddress = int (*)(char* text, int num_bytes, int device);
  void* symbol = dlsym(RTLD_DEFAULT, "cudaDeviceGetPCIBusId");
  for (const char* const name : {"libcudart.so.13", "libcudart.so.12"}) {
    if (symbol != nullptr) break;
    void* const runtime = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    if (runtime != nullptr) symbol = dlsym(runtime, "cudaDeviceGetPCIBusId");
  }
  std::array<char, 32> text{};
  const auto function = reinterpret_cast<PciAddress>(symbol);
  if (function == nullptr || function(text.data(), static_cast<int>(text.size()), index) != 0) {
    return {};
  }
  return text.data();
}

}  // namespace

DeviceIdentity identity_of(const Device& device, os::System& system) {
  const os::HostInfo host = system.host();
  std::string in_host = format("process {}/{}", host.pid, to_string(device));
  if (device.type == DeviceType::kCuda) {
    const std::string address = pci_address(device.index);
    in_host = address.empty() ? to_string(device) : address;
  }
  return {.name = format("{}/{}", host.name, in_host), .host = host.boot_id};
}

}  // namespace cadre::device
