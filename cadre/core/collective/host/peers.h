// The synchronization of the ranks of a host group: they announce an operation, count steps, and
// wait.
//
// Threads: one at a time, the one that runs the operation. Blocking: enter() and the waits, until
// the operation's deadline, the Interrupt, or a mismatch that any rank has found. Lifetime: borrows
// the System and the Interrupt; the arena's memory outlives it. Errors: kTimeout with
// OpProgress::waiting_for naming the first missing rank; kAborted;
// kInvalidArgument with OpProgress::set_mismatch. After an error the group is unusable.
//
// Flags are 32-bit counters that only grow and may wrap: they are compared by their difference.
// A wait first spins, if every rank has a core of its own, then yields, then sleeps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/core/collective/host/arena.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/os/interrupt.h"
#include "cadre/core/os/system.h"

namespace cadre::host {

struct PeersOptions {
  Rank rank = 0;
  int world_size = 1;
  // There are more ranks than cores, so a wait yields the core at once.
  bool oversubscribed = false;
  // The initial value of all counters of the arena: 0 in a new arena.
  uint32_t first_count = 0;
  // group_ranks[r] is the number by which errors and OpProgress name rank r. Empty: its own number.
  std::vector<Rank> group_ranks = {};
};

class Peers {
 public:
  Peers(os::System& system, const os::Interrupt& interrupt, Arena arena,
        const PeersOptions& options);

  Rank rank() const { return rank_; }
  int world_size() const { return world_size_; }
  // Returns the number by which errors and OpProgress name this rank.
  Rank group_rank(Rank rank) const {
    return group_ranks_.empty() ? rank : group_ranks_[static_cast<size_t>(rank.value)];
  }
  const Arena& arena() const { return arena_; }
  // Returns the sequence number of the last enter(); next_sequence() returns that of the next one.
  uint32_t sequence() const { return sequence_; }
  uint32_t next_sequence() const { return sequence_ + 1; }

  // Announces the operation with a payload of at most kInlineBytes and waits until every rank has
  // announced the same operation. Everything that a rank wrote before its enter() is then visible
  // to this rank.
  Status enter(const OpContext& op, ConstBytes payload);
  // Returns the payload that `rank` passed to the last enter().
  const std::byte* payload_of(Rank rank) const {
    return arena_.entry(rank, sequence_).payload.data();
  }

  // Publishes that this rank has reached a step of the operation; each operation counts its steps
  // from 0. Everything that was written before signal_step(n) is visible to every rank that has
  // waited for step n.
  void signal_step(uint32_t step);
  Status wait_for(Rank rank, uint32_t step, const OpContext& op);
  Status wait_for_all(uint32_t step, const OpContext& op);
  // Called when an operation whose highest step is `last` has ended; the next operation counts from
  // 0.
  void end_steps(uint32_t last) { step_base_ += last; }

  // Publishes that this rank ends the operation with an error. A peer that has accessed memory of
  // this rank then returns an error instead of a result.
  void mark_left();
  // Returns kAborted if a rank has left this operation, or an earlier one, with an error. Call it
  // before accessing memory of a peer, and once more after all peers have reached the last step.
  Status check_left(const OpContext& op) const;
  // Called after mark_left(). Returns whether no peer accesses this rank's memory any more: each
  // peer has reached step 1, or none can begin because a rank has not entered. Waits for at most
  // `patience`.
  bool are_done(Duration patience);
  // Wakes the ranks that sleep on this rank's entry, unless that was already done. Call it after
  // each successful enter(): before long work, else at the end of the operation.
  void wake_sleepers();

 private:
  // The condition for which a wait waits; `rank` is the rank that must meet it.
  struct Goal {
    os::WaitWord& word;
    uint32_t value;
    Rank rank;
  };

  Status wait(const Goal& goal, const OpContext& op);
  Status sleep(const Goal& goal, const OpContext& op);
  Status check_interruptions(const Goal& goal, const OpContext& op);
  bool found_by_others() const;
  Status compare_entry(Rank peer, const OpContext& op);
  Status compare_arrived(const OpContext& op);
  Status report_mismatch(Rank peer, const OpContext& op);
  void wake_everyone();

  os::System& system_;
  const os::Interrupt& interrupt_;
  const Arena arena_;
  const Rank rank_;
  const int world_size_;
  const std::vector<Rank> group_ranks_;
  const int spin_limit_;
  const int yield_limit_;
  // The number of spins of the next wait. It grows when spinning succeeds, and shrinks when it does
  // not.
  int spin_budget_;
  uint32_t sequence_;
  uint32_t step_base_;
  bool are_sleepers_awake_ = true;
  std::atomic<uint32_t> barrier_{0};  // the cache line on which wake_sleepers() makes its fence
};

}  // namespace cadre::host
