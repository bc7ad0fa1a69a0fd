// Lets a program survive the failure of another rank without a restart of its own process.
//
// When a worker fails, `cadre run --max-restarts` stops all others and starts all again. A rank
// that has made a Recovery is not stopped if it calls wait_for_membership(): it keeps its process
// and its memory, the launcher starts new processes only in the places of ranks that have ended,
// and all connect again. rank, world size and store may be others than before.
//
// The restart counts against --max-restarts as any other. A rank that has not come to wait within
// RecoveryOptions::comes_within of a failure is stopped and replaced by a new process, as is one
// that has ended with exit code 0. When hosts join a job that has not failed, no rank waits, so all
// processes are replaced.
//
// The environment variables of the process keep the values with which it was started:
// getenv("RANK") is the rank of the first membership. connect_from_environment() and
// init_process_group() read the values of the present one.
//
// Threads: one. Make it before the group is connected. Lifetime: borrows the System. The destructor
// withdraws the offer to wait, so that a later failure stops this rank.
// Blocking: wait_for_membership() until its Deadline; the others for the time of a small file.
// Errors: in the description of each method. The launcher kills a rank that waits when the job ends
// or the launcher dies.
// Guide: docs/guide/running/recovery.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/system.h"

namespace cadre {

struct RecoveryOptions {
  // How long after the failure of another rank this one calls wait_for_membership() at the latest:
  // its longest step, or the timeout of its operations.
  Duration comes_within = std::chrono::seconds(30);
};

// This rank's place in the job.
struct JobPosition {
  Rank rank = 0;
  int world_size = 1;
  int restart_count = 0;  // how often the launcher has started workers again

  friend bool operator==(const JobPosition&, const JobPosition&) = default;
};

class CADRE_EXPORT Recovery {
 public:
  // Tells the launcher that this rank can wait. Throws kInvalidArgument if comes_within is not
  // positive, and kUnavailable if the file for the launcher cannot be written.
  explicit Recovery(os::System& system, const RecoveryOptions& options = {});
  ~Recovery();
  Recovery(const Recovery&) = delete;
  Recovery& operator=(const Recovery&) = delete;

  // Returns whether a launcher that can give this rank a new membership has started it. Without
  // one, also under torchrun, a failure ends the job as before.
  bool is_available() const { return !file_.empty(); }
  // Returns whether is_available(), and the error is the failure of a group: kPeerLost, kTimeout or
  // kAborted. Any other error is one of this rank, which should end with it.
  bool can_recover(const Error& error) const;

  // Waits for the next membership, with which connect_from_environment() then connects. Close or
  // destroy all groups before: a group of the last membership cannot be used any more, and its
  // other ranks do not notice that this rank has left while its object exists.
  // Throws kTimeout if no membership comes until the deadline, for example because no rank has
  // failed; the rank then counts as running again. Throws kUnavailable unless is_available().
  JobPosition wait_for_membership(Deadline deadline);

  // Returns how many memberships this process has received after failures.
  uint64_t num_memberships() const { return num_memberships_; }

 private:
  Status tell_launcher(bool is_waiting, Duration comes_within);
  bool has_next_membership();

  os::System& system_;
  const RecoveryOptions options_;
  const std::string file_;  // what the launcher reads; empty without such a launcher
  uint64_t num_memberships_ = 0;
};

// The rank that has the newest state, and the step of that state.
struct NewestState {
  Rank rank = 0;
  int64_t step = 0;

  friend bool operator==(const NewestState&, const NewestState&) = default;
};

// Collective. `step` is the step of the state that this rank has in memory; nullopt if it has none,
// as a new process. Returns, equal on all ranks, the lowest rank with the highest step; nullopt if
// no rank has a state. Throws the failure of the group.
CADRE_EXPORT std::optional<NewestState> find_newest_state(Communicator& group,
                                                          std::optional<int64_t> step);

// Collective. Copies the newest state, as find_newest_state() finds it, to all ranks: `parts` are
// its buffers, of which all ranks have the same number and sizes. Returns the source and its step.
// Throws kInvalidArgument on all ranks if no rank has a state, or if the sizes of two ranks differ;
// in both cases no buffer has changed.
CADRE_EXPORT NewestState broadcast_newest_state(Communicator& group, std::optional<int64_t> step,
                                                std::span<const Bytes> parts);

}  // namespace cadre
