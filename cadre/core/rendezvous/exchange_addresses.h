// The ranks exchange their addresses through a store. Each rank writes an entry under its rank
// number and reads the entries of all others. Thereby the exchange detects two processes with one
// rank number, or ranks with different world sizes, and the error names these ranks. A rank with
// another world size than rank 0 detects that as soon as both have written; rank 0 detects it when
// its whole world has written, or when the wait gets long.
//
// Threads: one. Blocking: until all ranks have written, or the Deadline. Lifetime: borrows its
// arguments for the call. Errors: kTimeout names the missing ranks; kInvalidArgument for entries
// that contradict each other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/log.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/store.h"

namespace cadre {

// The numeric addresses of the two ends of this rank's connection to the store; empty if no network
// is used.
struct StoreView {
  std::string local_host;
  std::string store_host;

  friend bool operator==(const StoreView&, const StoreView&) = default;
};

struct ExchangeOptions {
  Rank rank;
  int world_size = 1;
  uint64_t round = 0;
  StoreView view;
  // The time after which the lowest rank that has joined logs, once, that it waits for others.
  Duration warn_after = kStoreWarnTime;
  LogSink* log = nullptr;  // if null, nothing is logged
};

// Returns the StoreView of each rank, indexed by rank.
Result<std::vector<StoreView>> exchange_addresses(os::System& system, Store& store,
                                                  const ExchangeOptions& options,
                                                  Deadline deadline);

// Returns the addresses at which the other ranks can connect to `rank`. Usually this is the address
// from which the rank reaches the store. A rank on the store's own host reaches the store over
// loopback, so it gets the addresses at which the other hosts reach the store, perhaps several. If
// all ranks are on one host, the result is loopback alone.
CADRE_EXPORT Result<std::vector<std::string>> choose_listen_hosts(
    const std::vector<StoreView>& views, Rank rank);

CADRE_EXPORT bool is_loopback_host(std::string_view host);

}  // namespace cadre
