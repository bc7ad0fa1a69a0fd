// How the ranks of a job learn that one of them has died before they are connected: each leaves a
// will with the store server. When the process ends, the server appends the rank to the list of
// lost ranks (lost_rank.h) of the round and the group.
//
// Threads: any. Blocking: leave_presence_will() until its Deadline. Lifetime: a
// Membership keeps its will; destroying the Membership retracts the will. Errors: those of the
// store.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/rendezvous/rendezvous.h"

namespace cadre {

CADRE_EXPORT std::string lost_key(uint64_t round, std::string_view group);

// Sets membership.will and will_group, for the membership's rank, round and group. REQUIRES:
// membership.store.
CADRE_EXPORT Status leave_presence_will(os::System& system, Membership& membership,
                                        Deadline deadline);

}  // namespace cadre
