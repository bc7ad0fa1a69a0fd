// Converts between c10's devices and those of the code below the torch line.
//
// Threads: pure functions.
#pragma once

#include <c10/core/Device.h>

#include <optional>

#include "cadre/core/base/types.h"

namespace cadre::device {

// Returns nullopt for a type on which no engine works.
std::optional<Device> to_core(const c10::Device& device);
c10::Device to_c10(const Device& device);

}  // namespace cadre::device
