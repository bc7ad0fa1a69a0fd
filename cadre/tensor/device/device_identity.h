// Identifies the hardware behind a device of a process, so that processes can find out whether they
// use the same one.
//
// Threads: any. Blocking: never. Errors: none.
#pragma once

#include <compare>
#include <string>

#include "cadre/core/base/types.h"

namespace cadre::os {
class System;
}

namespace cadre::device {

struct DeviceIdentity {
  // The host and the address on its PCI bus of a CUDA device, for example "node0/0000:17:00.0".
  // Processes with different CUDA_VISIBLE_DEVICES count their devices differently. A device of
  // another type counts as a device of its process.
  std::string name;
  std::string host;  // os::HostInfo::boot_id; hosts may have equal names

  friend auto operator<=>(const DeviceIdentity&, const DeviceIdentity&) = default;
};

DeviceIdentity identity_of(const Device& device, os::System& system);

}  // namespace cadre::device
