// Checks the devices of tensors before a wrapper is constructed, and lets all ranks fail if the
// device of one has no memory for it.
//
// Threads: any. Blocking: make_on_all_ranks() is a collective if the device is not the CPU; the
// others never block. Errors: kInvalidArgument that names the first tensor that does not fit.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::wrap {

// Returns a sentence about the first tensor that a group cannot send: it is neither on the CPU nor
// on this rank's device in the group (ProcessGroup::device()). Undefined tensors, and those on the
// meta device, have no memory and are not sent.
CADRE_EXPORT std::optional<std::string> beyond_reach(std::optional<c10::Device> of_group,
                                                     std::span<const NamedTensor> tensors);

// Returns a sentence about the first tensor that is not on the device of the first one. Undefined
// tensors, and those on the meta device, do not count.
CADRE_EXPORT std::optional<std::string> not_on_one_device(std::span<const NamedTensor> tensors);

// Throws unless all tensors are on one device on which the group works. `what` is the name of the
// object under construction, with which the message begins.
CADRE_EXPORT void check_devices(std::string_view what, std::span<const NamedTensor> tensors,
                                std::optional<c10::Device> of_group);

// Runs `make`, which allocates memory of `device` and contains no collective of the group, on all
// ranks. If the device of one rank has not enough memory, all ranks throw its error: see
// check_on_all_ranks(). On the CPU it only calls `make`, which may be collective there. `call` is
// the name of the program's call, as static text.
CADRE_EXPORT void make_on_all_ranks(const ProcessGroup& group, std::string_view call,
                                    c10::Device device, const std::function<void()>& make);

}  // namespace cadre::wrap
