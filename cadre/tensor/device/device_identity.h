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
  std::string name;  // a text for messages, such as "node0/0000:17:00.0"
  // Equal in all processes that use this device: the running kernel of the machine, and the address
  // of a CUDA device on the PCI bus. So two containers of one machine see that they share a device,
  // and two machines with one name that they do not. Processes with different CUDA_VISIBLE_DEVICES
  // count their devices differently. A device of another type counts as a device of its process.
  std::string key;

  friend auto operator<=>(const DeviceIdentity& one, const DeviceIdentity& other) {
    return one.key <=> other.key;
  }
  friend bool operator==(const DeviceIdentity& one, const DeviceIdentity& other) {
    return one.key == other.key;
  }
};

DeviceIdentity identity_of(const Device& device, os::System& system);

}  // namespace cadre::device
