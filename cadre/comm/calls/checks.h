// The refusals of messages and of calls that name a rank, whose arguments cannot be right on any
// rank. Those of collectives: collective/collective.h.
//
// Threads: any. Blocking: never. Errors: each throws kInvalidArgument that begins with the call's
// name, says what was passed and what was expected.
#pragma once

#include <string>
#include <string_view>

#include "cadre/base/types.h"

namespace cadre {

[[noreturn]] void refuse_call(std::string message);

void check_elements(std::string_view call, ConstBytes bytes, DType dtype);
// `what` is "this rank", "the peer" or "the rank".
void check_rank(std::string_view call, std::string_view what, Rank rank, int world_size);
void check_peer(std::string_view call, Rank peer, Rank self, int world_size);

}  // namespace cadre
