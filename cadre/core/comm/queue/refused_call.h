// Checks arguments of calls that are made before a group exists.
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/types.h"

namespace cadre {

// Throws kInvalidArgument with the message.
[[noreturn]] void refuse_call(std::string message);
// Throws if the rank is outside the group. `what` is "this rank", "the peer" or "the rank".
void check_rank(std::string_view call, std::string_view what, Rank rank, int world_size);

}  // namespace cadre
