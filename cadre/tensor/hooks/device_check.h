// Refuses tensors on devices, for the parts of the library that work on memory of the CPU.
//
// Threads: any. Blocking: never. Errors: kInvalidArgument that names the first such tensor.
#pragma once

#include <span>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::wrap {

// Throws if one of the tensors is neither on the CPU nor on the meta device, which has no memory.
// `what` is the name of the object under construction, with which the message begins.
CADRE_EXPORT void refuse_devices(std::string_view what, std::span<const NamedTensor> tensors);

}  // namespace cadre::wrap
