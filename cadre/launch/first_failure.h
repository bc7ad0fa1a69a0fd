// Which worker of a failed job has failed first. A worker that ends because another one has failed
// often ends before it: the other still unwinds its stack. So the exit of a worker that names
// another one (rendezvous/named_culprit.h) counts only if that one does not fail soon after it.
//
// Threads: one. Blocking: `named` is called for workers that have ended, once for each. Lifetime:
// borrows the System. Errors: none.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <span>

#include "cadre/base/deadline.h"
#include "cadre/base/types.h"
#include "cadre/launch/worker_group.h"
#include "cadre/os/host/secret.h"
#include "cadre/os/socket.h"
#include "cadre/os/system.h"

namespace cadre::launch {

class FirstFailure {
 public:
  // The rank that a worker holds to be at fault; nullopt for none.
  using Named = std::function<std::optional<Rank>(Rank)>;
  // How long after the first exit the worker that it names may end.
  static constexpr Duration kWindow = std::chrono::seconds(1);

  FirstFailure(os::System& system, Named named) : system_(system), named_(std::move(named)) {}

  // The failure, given all exits so far in their order; nullopt when no worker has failed, other
  // than those that were asked to stop.
  std::optional<WorkerExit> find(std::span<const WorkerExit> exits);
  // Whether a worker has failed and no later exit changes which was the first: the job can be
  // stopped.
  bool is_known(std::span<const WorkerExit> exits);
  // When is_known() is to be called again at the latest.
  std::optional<Deadline> due() const { return window_; }
  // What `named` has returned for a worker that has ended.
  std::optional<Rank> named_by(Rank rank);

 private:
  os::System& system_;
  const Named named_;
  std::map<int, std::optional<Rank>> known_;
  std::optional<Deadline> window_;  // while it is open
};

// Asks the job's store, which this process serves. Waits for half a second at most.
std::optional<Rank> culprit_in_store(os::System& system, const os::Address& store,
                                     const os::Secret& token, Rank rank);

}  // namespace cadre::launch
