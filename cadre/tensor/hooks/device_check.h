// Refuses modules on devices on which a part of the library does not work.
//
// Threads: any. Blocking: never. Errors: kInvalidArgument that names the first such tensor.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <span>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::wrap {

// Throws if one of the tensors is neither on the CPU nor on the meta device, which has no memory.
// `what` is the name of the object under construction, with which the message begins.
CADRE_EXPORT void refuse_devices(std::string_view what, std::span<const NamedTensor> tensors);

// Throws unless all tensors are on one device on which the group works: the CPU, or `of_group`,
// this rank's device in the group (ProcessGroup::device()). Tensors on the meta device are ignored.
CADRE_EXPORT void check_devices(std::string_view what, std::span<const NamedTensor> tensors,
                                std::optional<c10::Device> of_group);

}  // namespace cadre::wrap
