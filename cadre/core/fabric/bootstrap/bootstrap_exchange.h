// Exchanges addresses through the store while the ranks of a job connect: each rank publishes its
// address, rank 0 collects them and gives each rank a ticket, which names its sponsor.
//
// Threads: one. Blocking: all but the constructor, until the deadline, and up to a second beyond it
// to find out why that passed. Lifetime: borrows all of its Context.
// Errors: kTimeout names the ranks that did not come; kInvalidArgument names both versions when
// they differ; what the watch reports; those of the store.
// P ranks that arrive at once make 6 requests each (number of the attempt, address, wait for the
// ticket, ticket, two erasures), but rank 0 makes 4, and 2 for each 64 ranks to read the addresses:
// 6 P - 2 + 2 ceil(P / 64). A wait of more than 50 ms asks for trouble (2 more, every 500 ms at
// last) and is made again. With addresses of C bytes (some 200) and keys of K (some 30) the store
// receives about (2 C + 10 K) P bytes and sends 2 C P.
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
    std::string group_prefix;  // store prefix of the group and round
    uint64_t attempt = 0;
  };
  explicit BootstrapExchange(Context context);

  // Store prefix of an attempt of the group and round.
  static std::string prefix_of(const std::string& group_prefix, uint64_t attempt);

  Status publish(const wire::RankAddress& rank_address, Deadline deadline);
  // Rank 0: the addresses of all ranks, which have one version.
  Result<std::vector<wire::RankAddress>> collect(Deadline deadline);
  // Rank 0: the tickets of ranks 1, 2, ...
  Status hand_out(std::span<const wire::Ticket> tickets, Deadline deadline);
  // The other ranks.
  Result<wire::Ticket> await_ticket(Deadline deadline);
  // What this rank alone has still in the store.
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
