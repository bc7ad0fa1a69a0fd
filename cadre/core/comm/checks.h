// Checks arguments of a group's calls that one rank can check alone, whatever the other ranks pass.
// validate() in collective/collective.h checks the arguments of collectives.
//
// Threads: any. Blocking: never. Errors: each check throws kInvalidArgument; the message says what
// was passed and what was expected.
#pragma once

#include <optional>
#include <string_view>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/queue/work.h"

namespace cadre {

// Returns the error "CALL on group "NAME", rank R: PROBLEM"; its details() contain the call and the
// group.
CADRE_EXPORT Error refusal_of(const Communicator& group, std::string_view call,
                              std::string_view problem);

// Returns the point in time that is `timeout` from now. Throws if the timeout is not positive.
CADRE_EXPORT Deadline deadline_of(const Communicator& group, std::string_view call,
                                  Duration timeout);
// Returns the deadline of a call with these options; nullopt if the options have neither a deadline
// nor a timeout, so that the group's timeout applies. Throws if they have both.
std::optional<Deadline> deadline_of(const Communicator& group, std::string_view call,
                                    const CollectiveOptions& options);

void check_elements(const Communicator& group, std::string_view call, ConstBytes bytes,
                    DType dtype);
// Checks that the peer of a message is another rank of the group.
CADRE_EXPORT void check_peer(const Communicator& group, std::string_view call, Rank peer);
// Throws if `call` needs peers and only this rank of the group exists (groups/lone_group.h).
void check_has_peers(const Communicator& group, std::string_view call, std::string_view remedy);

}  // namespace cadre
