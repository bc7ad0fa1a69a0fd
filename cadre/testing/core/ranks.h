// Runs one function as several ranks, each a thread of this process.
//
// Threads: call it from one thread. Blocking: until all ranks have ended. Lifetime: every thread is
// joined. Errors: an exception of a rank is returned as text with the rank. A rank that finds a
// wrong result throws CheckFailed (require()); then its group is destroyed, and the other ranks
// fail at once instead of waiting for this rank.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/store.h"

namespace cadre::testing {

// The timeout for connecting and for each operation of the ranks of a test.
inline constexpr Duration kRankTimeout = std::chrono::seconds(20);

struct RankContext {
  os::System& system;
  Rank rank;
  int world_size = 1;
  // An address that is unique to this run. Rank 0 may listen there, so that the other ranks can
  // connect to it.
  os::Address rendezvous_address;
  // A text that the rank function sets; the test gets it in RankOutcome.
  std::string output;
  // The store that the ranks of this run share; null for ranks that are processes.
  std::shared_ptr<Store> store = {};
  // The address of this rank's host if there are several hosts, else empty.
  std::string listen_host = {};
};

using RankMain = std::function<void(RankContext&)>;

struct RankOutcome {
  // Empty if the rank function returned; otherwise its error, or how the process died.
  std::string failure;
  std::string output;
  int signal = 0;  // the signal that killed the rank's process, else 0
};

struct CADRE_EXPORT RanksResult {
  std::vector<RankOutcome> ranks;
  // A failure of the run that belongs to no rank, such as a planned fault that did not occur; else
  // empty.
  std::string failure = {};

  bool ok() const;
  // Returns the failure of the run, if there is one, and a line such as "rank 1: kTimeout: ..." for
  // each rank that failed; an empty text if nothing failed.
  std::string failures() const;
};

// Runs `rank_main` as `world_size` ranks. All ranks are threads of this process and share one
// native System.
CADRE_EXPORT RanksResult run_ranks_as_threads(int world_size, const RankMain& rank_main);

// Connects the group of all ranks of a run. All ranks call it. If options.listen_host is empty, the
// rank listens at context.listen_host. REQUIRES: the context has a store.
CADRE_EXPORT std::unique_ptr<Communicator> connect_ranks(
    RankContext& context, const CommunicatorOptions& options = {.timeout = kRankTimeout},
    Duration timeout = kRankTimeout);

// The exception of require(). It is no cadre::Error, because a failed check is a defect of the test
// or of the tested program and not of Cadre; so code that handles a cadre::Error does not catch it.
class CADRE_EXPORT CheckFailed : public std::runtime_error {
 public:
  explicit CheckFailed(std::string_view what);
};

// Throws CheckFailed with the text "check failed: " and `what` unless the condition holds.
CADRE_EXPORT void require(bool condition, std::string_view what);

// Returns a unix socket address that no other run uses.
CADRE_EXPORT os::Address make_rendezvous_address(os::System& system);

// Calls `body` and returns the exception that it throws as "kCode: message", or as "exception: ..."
// if it is no cadre::Error; an empty text if it returns.
CADRE_EXPORT std::string failure_of(const std::function<void()>& body);

// Calls `body` and returns the fields of the Error that it throws, without unknown ones, such as
// "kTimeout culprit=1 operation=all_reduce#2"; an empty text if it returns. Use it in tests that do
// not compare messages.
CADRE_EXPORT std::string failed_fields_of(const std::function<void()>& body);

}  // namespace cadre::testing
