// How the ranks of a job learn that one of them has died before they are connected: each leaves a
// will with the store server. When the process ends, the server appends a line "RANK PID HOST" to
// the list of lost ranks of the round and the group.
//
// Threads: any. Blocking: leave_presence_will() until its Deadline. Lifetime: values; a Membership
// keeps its will, and destroying the Membership retracts the will. Errors: those of the store;
// lines that are not of that form are ignored.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/rendezvous/rendezvous.h"

namespace cadre {

struct LostRank {
  Rank rank;  // the rank in the membership of the process that left the will
  int pid = 0;
  std::string host;

  friend bool operator==(const LostRank&, const LostRank&) = default;
};

CADRE_EXPORT std::string write_lost_rank(const LostRank& lost);
CADRE_EXPORT std::vector<LostRank> read_lost_ranks(std::string_view text);

CADRE_EXPORT std::string lost_key(uint64_t round, std::string_view group);

// Leaves the will of this rank with the store, and sets membership.will and membership.will_group.
// REQUIRES: membership.store is not null.
CADRE_EXPORT Status leave_presence_will(os::System& system, Membership& membership,
                                        Deadline deadline);

}  // namespace cadre
