// Throws for a call whose arguments are wrong whatever the other ranks pass, before a group is
// known.
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/types.h"

namespace cadre {

// Throws kInvalidArgument.
[[noreturn]] void refuse_call(std::string message);
// Throws if the rank is outside the group. `what` is "this rank", "the peer" or "the rank".
void check_rank(std::string_view call, std::string_view what, Rank rank, int world_size);

}  // namespace cadre
