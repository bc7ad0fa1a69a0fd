// Detects failures of other ranks while a group connects: a rank that died, and a rank that failed
// and reported its error through the store. Without it the others would wait until their deadline.
//
// Threads: one. Blocking: as each method says. Lifetime: borrows the System and the Membership.
// Errors: what another rank reported, with its code; kPeerLost for a rank that has died.
// It asks the store 50 ms after the first wait, then at growing intervals of up to 500 ms, so a
// group that connects quickly costs the store nothing. A store that does not answer in time is
// slow, not trouble: it is given more time at each attempt.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/wire/control.h"

namespace cadre {

class BootstrapWatch {
 public:
  // What a call of the store may take at first.
  static constexpr Duration kStoreTime = std::chrono::seconds(1);

  // `prefix` is that of the group and the attempt in the store.
  BootstrapWatch(os::System& system, const Membership& membership, const std::string& prefix);

  // The addresses of all ranks, borrowed, once they are known: they show whether a rank that died
  // is of this group.
  void know(std::span<const wire::RankAddress> rank_addresses) { rank_addresses_ = rank_addresses; }

  // System::poll, with a look now and then. False at the deadline. Both count by time, also in many
  // calls of which each finds something ready: strangers can see to that.
  Result<bool> poll(std::span<os::PollItem> items, Deadline deadline);
  // Store::multi_get likewise.
  Result<std::vector<std::string>> multi_get(std::span<const std::string> keys, Deadline deadline);

  // Tells the others the error that ends this rank's attempt, unless it came from them. Best
  // effort, for a second at most.
  void report(const Error& error);
  // What a rank has reported by now.
  Status look_for_report(Deadline deadline);
  // The trouble that others report, or the death of a rank, within this time; ok when there is
  // none.
  Status await_report(Duration patience);
  // Whether the trouble came from others, or from the store.
  bool was_told() const { return was_told_; }

 private:
  // The trouble there is by now. Blocking: for a few answers of the store.
  Status look(Deadline deadline);
  // The value of a key; nullopt when it is absent, or when the store does not answer in time.
  Result<std::optional<std::string>> read(const std::string& key, Deadline deadline);
  Status look_for_lost(Deadline deadline);
  Deadline next_look();

  os::System& system_;
  const Membership& membership_;
  const std::string trouble_key_;
  const std::string lost_key_;
  std::span<const wire::RankAddress> rank_addresses_;
  Duration pause_;
  std::optional<Deadline> look_at_;  // the next look of poll(); none before its first call
  Duration store_time_;              // for an answer of the store
  bool was_told_ = false;
};

}  // namespace cadre
