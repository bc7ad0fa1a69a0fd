// How the ranks of a job learn that one of them has died before they are connected: each leaves a
// will with the store server, which tells the round's key for lost ranks when the process ends.
//
// Threads: any. Blocking: leave_presence_will() until its Deadline. Lifetime: a will is kept by its
// Membership; dropping that in good order retracts it. Errors: those of the store.
// What the key holds is a line for each lost rank: "RANK PID HOST".
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/rendezvous/rendezvous.h"

namespace cadre {

struct LostRank {
  Rank rank;  // in the membership that left the will
  int pid = 0;
  std::string host;

  friend bool operator==(const LostRank&, const LostRank&) = default;
};

CADRE_EXPORT std::string lost_key(uint64_t round);
CADRE_EXPORT std::string write_lost_rank(const LostRank& lost);
// Lines that say nothing of the kind are passed over.
CADRE_EXPORT std::vector<LostRank> read_lost_ranks(std::string_view text);

// Sets membership.will, for its rank and round. REQUIRES: membership.store.
CADRE_EXPORT Status leave_presence_will(os::System& system, Membership& membership,
                                        Deadline deadline);

}  // namespace cadre
