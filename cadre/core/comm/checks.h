// Checks those arguments of a group's calls that are valid or invalid in themselves, independent of
// what the other ranks pass. validate() in collective/collective.h checks the arguments of
// collectives.
//
// Threads: any. Blocking: never. Errors: each check throws kInvalidArgument; the message says what
// was passed and what was expected.
#pragma once

#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"

namespace cadre {

// Returns the error "CALL on group "NAME", rank R: PROBLEM"; its details() contain the call and the
// group.
CADRE_EXPORT Error refusal_of(const Communicator& group, std::string_view call,
                              std::string_view problem);

void check_elements(const Communicator& group, std::string_view call, ConstBytes bytes,
                    DType dtype);
// Checks that the peer of a message is another rank of the group.
CADRE_EXPORT void check_peer(const Communicator& group, std::string_view call, Rank peer);
// Throws if `call` needs peers and only this rank of the group exists (groups/lone_group.h).
void check_has_peers(const Communicator& group, std::string_view call, std::string_view remedy);

}  // namespace cadre
