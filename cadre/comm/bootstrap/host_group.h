// The ranks of one host, as far as they can share memory: a star of unix connections around the
// lowest rank, over which new segments are handed out.
//
// Threads: one owner at a time (the bootstrap, then the holder of the progress role).
// Blocking: form() and share_segment(), until their deadline or the interrupt.
// Lifetime: the status page lives as long as its last handle; connections end with the object.
// Errors: Results that name the rank that was waited for.
// Equal boot ids are only a hint (containers): what decides is whether every member could map the
// leader's segment and the leader saw what each wrote there.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/base/types.h"
#include "cadre/comm/bootstrap/handshake.h"
#include "cadre/comm/bootstrap/watch.h"
#include "cadre/comm/status_page.h"
#include "cadre/os/interrupt.h"
#include "cadre/os/system.h"
#include "cadre/store/store.h"
#include "cadre/wire/control.h"

namespace cadre {

class HostGroup {
 public:
  // Of a world of one.
  HostGroup() = default;

  // What form() works with; borrowed for the call.
  struct Site {
    os::System& system;
    const LinkTerms& terms;
    std::span<const wire::RankCard> cards;  // by rank
    os::Listener& unix_listener;
    Store& store;
    BootstrapWatch& watch;
    std::string key_prefix;  // of this group and round in the store
  };
  // Collective over the ranks with this rank's boot id.
  static Result<HostGroup> form(const Site& site, Deadline deadline);

  // Ascending; always holds this rank.
  const std::vector<int>& members() const { return members_; }
  bool shares_memory() const { return shares_memory_; }
  // Why not, if it does not.
  const std::string& obstacle() const { return obstacle_; }
  // With a slot for each member, in their order, if shares_memory(); else private with one.
  const StatusPage& status_page() const { return page_; }
  // The slot of a rank in the page; -1 for a rank whose slot cannot be read here.
  int slot_of(Rank rank) const;
  int own_slot() const { return slot_of(rank_); }

  // Collective over the members: one new zeroed segment of which all have a mapping.
  // REQUIRES: shares_memory().
  Result<std::shared_ptr<os::SharedMemory>> share_segment(os::System& system, size_t num_bytes,
                                                          const os::Interrupt* interrupt,
                                                          Deadline deadline);

 private:
  explicit HostGroup(Rank rank) : rank_(rank), members_() {}

  bool is_leader() const { return members_.front() == rank_.value; }
  Status connect_star(const Site& site, Deadline deadline);
  Status accept_members(const Site& site, const std::vector<bool>& comes, Deadline deadline);
  // Keeps the connection of a member that has proved itself.
  void place(Handshake& handshake);
  Status probe(const Site& site, Deadline deadline);
  Status probe_as_leader(const Site& site, bool all_came, Deadline deadline);
  Status probe_as_member(const Site& site, Deadline deadline);

  Rank rank_;
  std::vector<int> members_ = {0};
  // The leader's: by member, empty at its own place and where a member could not come. A member's:
  // one, to the leader, or none.
  std::vector<std::unique_ptr<os::Socket>> side_;
  StatusPage page_;
  bool shares_memory_ = false;
  std::string obstacle_;
};

}  // namespace cadre
