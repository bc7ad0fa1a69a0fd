// Checks the devices of tensors before a wrapper is constructed.
//
// Threads: any. Blocking: never. Errors: kInvalidArgument that names the first tensor that does not
// fit.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::wrap {

// Throws if one of the tensors is neither on the CPU nor on the meta device, which has no memory.
// `what` is the name of the object under construction, with which the message begins.
CADRE_EXPORT void refuse_devices(std::string_view what, std::span<const NamedTensor> tensors);

// Returns a sentence about the first tensor that the group cannot send: it is neither on the CPU
// nor on this rank's device in the group. Tensors on the meta device have no memory and are not
// sent.
CADRE_EXPORT std::optional<std::string> beyond_reach(const ProcessGroup& group,
                                                     std::span<const NamedTensor> tensors);

// Returns a sentence about the first tensor that is not on the device of the first one. Tensors on
// the meta device do not count.
CADRE_EXPORT std::optional<std::string> not_on_one_device(std::span<const NamedTensor> tensors);

}  // namespace cadre::wrap
