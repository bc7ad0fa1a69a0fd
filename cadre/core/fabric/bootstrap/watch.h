// Detects failures of other ranks while a group connects: a rank that died, and a rank that failed
// and reported its error through the store. Otherwise the ranks would wait until their deadline.
//
// Threads: one. Blocking: as each method says. Lifetime: borrows the System and the Membership.
// Errors: the error that another rank has reported, with its code; kPeerLost for a rank that has
// died.
// The watch reads the store 50 ms after the start of the first wait, then at growing intervals of
// up to 500 ms, so a group that connects quickly adds no load to the store. A store that does not
// answer in time counts as slow, not as failed, and gets more time at each attempt.
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
  // The time limit of a call to the store. It grows after each timeout.
  static constexpr Duration kStoreTime = std::chrono::seconds(1);

  // `prefix` is the prefix of the store keys of the group and attempt.
  BootstrapWatch(os::System& system, const Membership& membership, const std::string& prefix);

  // Called once the addresses of all ranks are known. The addresses are borrowed. With them the
  // watch finds out whether a rank that died belongs to this group.
  void know(std::span<const wire::RankAddress> rank_addresses) { rank_addresses_ = rank_addresses; }

  // Does the same as System::poll(), and also looks for failures from time to time. Returns false
  // at the deadline. The store is read and the deadline is checked even if an item is ready in
  // every call, since foreign processes could keep the items ready.
  Result<bool> poll(std::span<os::PollItem> items, Deadline deadline);
  // Does the same as Store::multi_get(), and also looks for failures.
  Result<std::vector<std::string>> multi_get(std::span<const std::string> keys, Deadline deadline);

  // Reports the error that ends this rank's attempt to the other ranks, unless the error is a
  // report of another rank. Best effort, for a second at most.
  void report(const Error& error);
  // Returns the error that another rank has reported; an ok status if no rank has reported one yet.
  Status look_for_report(Deadline deadline);
  // Waits up to `patience` for the report of another rank or the death of a rank, and returns it as
  // an error; an ok status if neither comes.
  Status await_report(Duration patience);
  // Returns whether an error was found in the store: a report of another rank, a death, or an error
  // of the store itself.
  bool was_told() const { return was_told_; }

 private:
  // Looks once into the store for a reported error and for dead ranks. Blocking: until the store
  // has answered a few requests.
  Status look(Deadline deadline);
  // Returns the value of a key; nullopt if it is absent, or if the store does not answer in time.
  Result<std::optional<std::string>> read(const std::string& key, Deadline deadline);
  Status look_for_lost(Deadline deadline);
  Deadline next_look();

  os::System& system_;
  const Membership& membership_;
  const std::string trouble_key_;
  const std::string lost_key_;
  std::span<const wire::RankAddress> rank_addresses_;
  Duration pause_;
  // The time at which poll() looks into the store next; nullopt before the first poll().
  std::optional<Deadline> look_at_;
  Duration store_time_;  // the time limit of a call to the store
  bool was_told_ = false;
};

}  // namespace cadre
