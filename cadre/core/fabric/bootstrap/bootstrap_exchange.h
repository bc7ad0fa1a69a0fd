// Exchanges addresses through the store while the ranks of a job connect: each rank publishes its
// address, rank 0 collects them and gives each rank a ticket, which names the rank that sends it
// the layout (its sponsor).
//
// Threads: one. Blocking: each method until its deadline, and up to a second longer after a
// timeout, to determine the cause of the timeout. Lifetime: borrows everything in its Context.
// Errors: kTimeout names the ranks that did not come; kInvalidArgument names both versions if two
// ranks run different versions of Cadre; the errors of the BootstrapWatch and of the store.
// The cost: if P ranks arrive at the same time, each makes 6 requests to the store: it reads the
// number of the attempt, writes its address, waits for its ticket, reads it, and erases both keys.
// Rank 0 makes 4 requests, and 2 more for each 64 ranks to read the addresses. The sum is 6 P - 2 +
// 2 ceil(P / 64). A wait of more than 50 ms is interrupted to ask for failures of other ranks (2
// more requests, at first after 50 ms, later every 500 ms) and then repeated. With addresses of C
// bytes (about 200) and keys of K bytes (about 30) the store receives about (2 C + 10 K) P bytes
// and sends 2 C P.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/fabric/bootstrap/watch.h"
#include "cadre/core/os/system.h"
#include "cadre/core/rendezvous/rendezvous.h"
#include "cadre/core/wire/layout.h"

namespace cadre {

class BootstrapExchange {
 public:
  struct Context {
    os::System& system;
    const Membership& membership;
    BootstrapWatch& watch;
    std::string group_prefix;  // the prefix of the store keys of this group and round
    uint64_t attempt = 0;
  };
  explicit BootstrapExchange(Context context);

  // Returns the prefix of the store keys of attempt number `attempt`.
  static std::string prefix_of(const std::string& group_prefix, uint64_t attempt);

  Status publish(const wire::RankAddress& rank_address, Deadline deadline);
  // Called on rank 0. Waits for the addresses of all ranks; returns an error if their versions
  // differ.
  Result<std::vector<wire::RankAddress>> collect(Deadline deadline);
  // Called on rank 0. Publishes the tickets of ranks 1, 2, ...
  Status hand_out(std::span<const wire::Ticket> tickets, Deadline deadline);
  // Called on the other ranks. Waits for this rank's ticket.
  Result<wire::Ticket> await_ticket(Deadline deadline);
  // Erases this rank's keys from the store.
  Status erase(Deadline deadline);

 private:
  std::string address_key(int rank) const;
  std::string ticket_key(int rank) const;
  std::vector<std::string> address_keys() const;
  Result<std::vector<std::string>> wait_for(std::span<const std::string> keys, Deadline deadline);
  bool is_own_timeout(const Error& error, Deadline deadline) const;
  Status check_retry() const;
  Error missing_addresses(const Error& error) const;
  Error missing_ticket(const Error& error);

  Context context_;
  const std::string prefix_;
};

}  // namespace cadre
