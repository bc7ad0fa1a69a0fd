// Runs one function as several ranks, each a thread of this process.
//
// Threads: call from one thread. Blocking: until all ranks have ended. Lifetime: nothing is left
// behind: every thread is joined. Errors: what a rank throws is returned as text with its rank. A
// rank that finds a wrong result throws (require()): then its group is destroyed, and the other
// ranks end at once instead of waiting for it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/store.h"

namespace cadre::testing {

// The limit of connecting and of each operation of the ranks of a test.
inline constexpr Duration kRankTimeout = std::chrono::seconds(20);

struct RankContext {
  os::System& system;
  Rank rank;
  int world_size = 1;
  // An address, unique to this run, at which rank 0 may listen so that the others find it.
  os::Address rendezvous_address;
  // The text that the rank returns to the test.
  std::string output;
  // The store that the ranks of this run share; null for ranks that are processes.
  std::shared_ptr<Store> store = {};
  // The address of this rank's host where there are several; else empty.
  std::string listen_host = {};
};

using RankMain = std::function<void(RankContext&)>;

struct RankOutcome {
  // Empty if the rank function returned; otherwise its error, or how the process died.
  std::string failure;
  std::string output;
  int signal = 0;  // the signal that ended the process of the rank; 0 for threads
};

struct CADRE_EXPORT RanksResult {
  std::vector<RankOutcome> ranks;

  bool ok() const;
  // Returns "rank 1: kTimeout: ..." for each rank that failed; an empty text if none did.
  std::string failures() const;
};

// All ranks are threads of this process and share one native System.
CADRE_EXPORT RanksResult run_ranks_as_threads(int world_size, const RankMain& rank_main);

// Connects the group of all ranks of a run, which all call it. Without a listen_host in the options
// it listens at the context's. REQUIRES: the context has a store.
CADRE_EXPORT std::unique_ptr<Communicator> connect_ranks(
    RankContext& context, const CommunicatorOptions& options = {.timeout = kRankTimeout},
    Duration timeout = kRankTimeout);

// Throws Error(kInternal) with `what` unless the condition holds.
CADRE_EXPORT void require(bool condition, std::string_view what);

// Returns a unix address that no other run uses.
CADRE_EXPORT os::Address make_rendezvous_address(os::System& system);

// Runs the function and returns what it threw as "kCode: message"; an empty text if it returned.
CADRE_EXPORT std::string failure_of(const std::function<void()>& body);

// Runs the function and returns the fields of the error that it threw, without unknown ones:
// "kTimeout culprit=1 operation=all_reduce#2". Returns an empty text if it threw nothing. For tests
// that do not compare messages.
CADRE_EXPORT std::string failed_fields_of(const std::function<void()>& body);

}  // namespace cadre::testing
