#include "cadre/core/collective/host/peers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre::host {
namespace {

// The number of times that a wait yields its core before it sleeps, which takes about 50 to 100 us.
// A switch between two ranks on one core costs 1.4 us; waking a sleeper on another core costs 10
// us.
constexpr int kYieldLimit = 100;
// The minimum number of spins of a rank that has a core of its own.
constexpr int kEagerSpins = 64;
constexpr uint64_t kMismatchBit = uint64_t{1} << 32;
constexpr uint64_t kLeftBit = uint64_t{1} << 63;
constexpr int kLeftRankShift = 32;

bool has_reached(const os::WaitWord& word, uint32_t value) {
  return static_cast<int32_t>(word.value.load(std::memory_order_acquire) - value) >= 0;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Peers::Peers(os::System& system, const os::Interrupt& interrupt, Arena arena,
             const PeersOptions& options)
    : system_(system),
      interrupt_(interrupt),
      arena_(std::move(arena)),
      rank_(options.rank),
      world_size_(options.world_size),
      group_ranks_(options.group_ranks),
      spin_limit_(options.oversubscribed ? 0 : system.spin_limit()),
      yield_limit_(system.spin_limit() > 0 ? kYieldLimit : 0),
      spin_budget_(spin_limit_),
      sequence_(options.first_count),
      step_base_(options.first_count) {}

Status Peers::enter(const OpContext& op, ConstBytes payload) {
  ++sequence_;
  Entry& mine = arena_.entry(rank_, sequence_);
  mine.number = op.number;
  mine.fingerprint = op.fingerprint();
  if (!payload.empty()) std::memcpy(mine.payload.data(), payload.data(), payload.size());
  if (spin_limit_ > 0) {
    // A plain store instead of publish(), whose fence would stall until this core owns the cache
    // line. wake_sleepers() wakes the sleepers later.
    mine.sequence.value.store(sequence_, std::memory_order_release);
    are_sleepers_awake_ = false;
  } else {
    system_.publish(mine.sequence, sequence_);
  }
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    CADRE_RETURN_IF_ERROR(wait({arena_.entry(peer, sequence_).sequence, sequence_, peer}, op));
    CADRE_RETURN_IF_ERROR(compare_entry(peer, op));
  }
  return {};
}

// The store of the sequence number and the read of the number of sleepers must not be reordered. A
// fence directly after the store would wait for the transfer of the cache line. When this function
// runs, the store has left the core, so an atomic exchange on memory of this rank alone is a cheap
// fence. A sleeper that this function misses wakes after System::kMaxNap at the latest.
void Peers::wake_sleepers() {
  if (are_sleepers_awake_) return;
  are_sleepers_awake_ = true;
  barrier_.exchange(sequence_, std::memory_order_seq_cst);
  os::WaitWord& word = arena_.entry(rank_, sequence_).sequence;
  if (word.sleepers.load(std::memory_order_seq_cst) != 0) system_.wake(word);
}

void Peers::signal_step(uint32_t step) {
  system_.publish(arena_.step_flag(rank_).step, step_base_ + step);
}

Status Peers::wait_for(Rank rank, uint32_t step, const OpContext& op) {
  return wait({arena_.step_flag(rank).step, step_base_ + step, rank}, op);
}

Status Peers::wait_for_all(uint32_t step, const OpContext& op) {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    CADRE_RETURN_IF_ERROR(wait_for(peer, step, op));
  }
  return {};
}

// Records in the group's notice (see arena.h) that this rank leaves the operation with an error.
// All stores and loads here, and the load in check_left(), are sequentially consistent. So a peer
// that did not see the mark had stored its entry or its step before the mark was set, and
// are_done() sees that entry or step.
void Peers::mark_left() {
  uint64_t none = 0;
  const uint64_t mark = kLeftBit | static_cast<uint64_t>(rank_.value) << kLeftRankShift | sequence_;
  arena_.notice().left.compare_exchange_strong(none, mark, std::memory_order_seq_cst);
}

Status Peers::check_left(const OpContext& op) const {
  const uint64_t mark = arena_.notice().left.load(std::memory_order_seq_cst);
  if (mark == 0 || static_cast<int32_t>(static_cast<uint32_t>(mark) - sequence_) > 0) return {};
  return Error(ErrorCode::kAborted,
               format("host engine: rank {} left an operation with an error while rank {} was in "
                      "\"{}\" of {} #{}; look at the first failure",
                      group_rank(static_cast<int>((mark & ~kLeftBit) >> kLeftRankShift)),
                      group_rank(rank_), op.progress.phase(),
                      OpDescriptor::from_fingerprint(op.fingerprint()).to_string(), op.number));
}

bool Peers::are_done(Duration patience) {
  // If some rank has not entered the operation, no peer can have begun it: all peers wait for that
  // rank first, and then see the mark that this rank has left.
  for (int peer = 0; peer < world_size_; ++peer) {
    if (!has_reached(arena_.entry(peer, sequence_).sequence, sequence_)) return true;
  }
  const Deadline deadline = system_.deadline_in(patience);
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    os::WaitWord& word = arena_.step_flag(peer).step;
    while (!has_reached(word, step_base_ + 1)) {
      const uint32_t seen = word.value.load(std::memory_order_acquire);
      const bool is_in_time = system_.wait_while(word, seen, deadline);
      if (!is_in_time && !has_reached(word, step_base_ + 1)) return false;
    }
  }
  return true;
}

Status Peers::wait(const Goal& goal, const OpContext& op) {
  if (has_reached(goal.word, goal.value)) return {};
  for (int i = 0; i < spin_budget_; ++i) {
    if (has_reached(goal.word, goal.value)) {
      spin_budget_ = std::min(spin_limit_, 2 * spin_budget_);
      return {};
    }
    // The first spins have no pause: on many CPUs a pause takes as long as a transfer between
    // cores.
    if (i >= kEagerSpins) pause();
    if (i % kEagerSpins == kEagerSpins - 1) CADRE_RETURN_IF_ERROR(check_interruptions(goal, op));
  }
  // Spinning did not help: the scheduler may have put both ranks on one core, where spinning only
  // keeps the other from running.
  spin_budget_ = std::min(spin_limit_, std::max(kEagerSpins, spin_budget_ / 2));
  wake_sleepers();
  op.progress.set_waiting_for(group_rank(goal.rank));
  Status status = sleep(goal, op);
  // waiting_for() keeps the rank after a timeout, because the error message names it.
  if (status.ok()) op.progress.set_waiting_for(-1);
  return status;
}

Status Peers::sleep(const Goal& goal, const OpContext& op) {
  for (int i = 0; i < yield_limit_; ++i) {
    system_.yield();
    if (has_reached(goal.word, goal.value)) return {};
    CADRE_RETURN_IF_ERROR(check_interruptions(goal, op));
  }
  while (true) {
    const uint32_t seen = goal.word.value.load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - goal.value) >= 0) return {};
    CADRE_RETURN_IF_ERROR(check_interruptions(goal, op));
    CADRE_RETURN_IF_ERROR(compare_arrived(op));
    if (!system_.wait_while(goal.word, seen, op.deadline) && !has_reached(goal.word, goal.value)) {
      return Error(ErrorCode::kTimeout,
                   format("host engine: rank {} waited for rank {} in \"{}\" until the deadline",
                          group_rank(rank_), group_rank(goal.rank), op.progress.phase()));
    }
  }
}

// The failure of a later operation may raise the interrupt although this operation is complete.
// Peers that have continued published their words before that failure, so the word is read once
// more.
Status Peers::check_interruptions(const Goal& goal, const OpContext& op) {
  if (interrupt_.is_raised()) {
    if (has_reached(goal.word, goal.value)) return {};
    return Error(ErrorCode::kAborted, format("host engine: rank {} was interrupted in \"{}\"",
                                             group_rank(rank_), op.progress.phase()));
  }
  return found_by_others() ? compare_arrived(op) : Status();
}

// Returns whether a peer has reported a mismatch in this operation or an earlier one. A mismatch in
// a later one means that this operation will complete.
bool Peers::found_by_others() const {
  const uint64_t mark = arena_.notice().mismatch.load(std::memory_order_acquire);
  return mark != 0 && static_cast<int32_t>(static_cast<uint32_t>(mark) - sequence_) <= 0;
}

Status Peers::compare_entry(Rank peer, const OpContext& op) {
  const Entry& entry = arena_.entry(peer, sequence_);
  if (entry.number == op.number && entry.fingerprint == op.fingerprint()) return {};
  return report_mismatch(peer, op);
}

// Compares the entries of the ranks that have arrived while this rank waits for another one, so
// that a mismatch is found at once. Skips entries with other sequence numbers: a rank with a later
// one has completed this operation, so its entry has matched.
Status Peers::compare_arrived(const OpContext& op) {
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    const Entry& entry = arena_.entry(peer, sequence_);
    if (entry.sequence.value.load(std::memory_order_acquire) != sequence_) continue;
    CADRE_RETURN_IF_ERROR(compare_entry(peer, op));
  }
  return {};
}

Status Peers::report_mismatch(Rank peer, const OpContext& op) {
  const Entry& entry = arena_.entry(peer, sequence_);
  op.progress.set_mismatch(group_rank(peer), entry.number, entry.fingerprint);
  arena_.notice().mismatch.store(kMismatchBit | sequence_, std::memory_order_release);
  wake_everyone();
  const auto text = [](const Fingerprint& fingerprint) {
    return OpDescriptor::from_fingerprint(fingerprint).to_string();
  };
  return Error(ErrorCode::kInvalidArgument,
               format("host engine: rank {} called {} as #{}, but rank {} called {} as #{}",
                      group_rank(rank_), text(op.fingerprint()), op.number, group_rank(peer),
                      text(entry.fingerprint), entry.number));
}

void Peers::wake_everyone() {
  for (int peer = 0; peer < world_size_; ++peer) {
    system_.wake(arena_.entry(peer, 0).sequence);
    system_.wake(arena_.entry(peer, 1).sequence);
    system_.wake(arena_.step_flag(peer).step);
  }
}

}  // namespace cadre::host
