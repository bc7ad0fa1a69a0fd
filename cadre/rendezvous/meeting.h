// The meeting of all ranks at a store: each leaves its card under its number and reads all others',
// so a number taken twice and world sizes that differ are found here and named. From the cards each
// learns by which addresses the others reach it. Who has another world size than rank 0 learns it
// as soon as both have come; rank 0 itself when all of its world have, or when the wait gets long.
//
// Threads: one. Blocking: until all have come, or the Deadline. Lifetime: borrows for the call.
// Errors: kTimeout names who is missing; kInvalidArgument for contradicting cards.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/base/log.h"
#include "cadre/base/types.h"
#include "cadre/os/system.h"
#include "cadre/store/store.h"

namespace cadre {

// How this rank's packets reach the store, by numeric addresses; empty where no network is used.
struct StoreView {
  std::string local_host;
  std::string store_host;

  friend bool operator==(const StoreView&, const StoreView&) = default;
};

struct MeetingTerms {
  Rank rank;
  int world_size = 1;
  uint64_t round = 0;
  StoreView view;
  // A wait of this length is told in the log, once, by the lowest rank that has come; null:
  // dropped.
  Duration warn_after = kStoreWarnTime;
  LogSink* log = nullptr;
};

// The views of all ranks, by rank.
Result<std::vector<StoreView>> meet(os::System& system, Store& store, const MeetingTerms& terms,
                                    Deadline deadline);

// Where the others reach the rank: at the address from which it reaches the store. A rank on the
// store's own host, which reaches it over loopback, is reached where the other hosts reach the
// store: perhaps at several addresses. Only loopback if no other host takes part.
CADRE_EXPORT Result<std::vector<std::string>> choose_listen_hosts(
    const std::vector<StoreView>& views, Rank rank);

CADRE_EXPORT bool is_loopback_host(std::string_view host);

}  // namespace cadre
