// Rendezvous: each process learns its rank, the world size and the round, a number that grows with
// each rejoin().
//
// Threads: join() from one thread. Blocking: until all ranks are known or the Deadline.
// Lifetime: a Membership shares its Store. Errors: kTimeout names what is missing;
// kInvalidArgument names the variable or address that is wrong.
// Source: torchelastic's rendezvous; the environment is torchrun's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/host/secret.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/store.h"

namespace cadre {

struct Membership {
  Rank rank = 0;
  int world_size = 1;
  uint64_t round = 0;  // is part of every key, so that the keys of different rounds differ
  std::shared_ptr<Store> store;  // the groups of a job share it; null for a world of one
  os::Secret job_token;  // the secret of the job, with which ranks prove that they belong to it
  // The world size that the rendezvous or rejoin() returned, if the ranks of this group still have
  // the numbers that they got there; a group with fewer ranks may keep the value. 0 if it is
  // unknown, or if the ranks of this group are numbered differently.
  int job_size = 0;
  // Numeric addresses of this host at which the other ranks reach it; empty means loopback.
  std::vector<std::string> listen_hosts;
  // The address of the store's host as this rank reaches it; empty if unknown.
  std::string store_host;
  // The will of this process: a value that the store publishes if the process dies. The copies of a
  // Membership share it.
  std::shared_ptr<StoreWill> will;
  // The name of the group whose ranks have left wills with the store: this group, or the group from
  // which it was split off.
  std::string will_group = {};
  // A name that only the group of these ranks has. The keys by which its survivors rejoin contain
  // it.
  std::string group = "world";
  // Returns the ranks whose hosts the launcher has lost until now. Any thread may call it. Null if
  // no launcher names such ranks, or if the ranks of this group are numbered differently.
  std::function<std::vector<Rank>()> lost_ranks = {};

  // Forgets what holds only for the ranks as the rendezvous has numbered them.
  void forget_numbers_of_job() {
    job_size = 0;
    lost_ranks = nullptr;
  }
};

// Returns kInvalidArgument unless 0 <= rank < world_size.
Status check_place(Rank rank, int world_size);

class CADRE_EXPORT Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual Result<Membership> join(Deadline deadline) = 0;
};

// The same as join() and rejoin(), for programs: they take a Duration and throw cadre::Error.
CADRE_EXPORT Membership join_within(os::System& system, Rendezvous& rendezvous, Duration timeout);
CADRE_EXPORT Membership rejoin_within(os::System& system, const Membership& previous,
                                      std::span<const Rank> lost, Duration timeout);

// The survivors of `previous` agree on a new Membership with a higher round, in which the ranks
// keep their order. `lost` lists the ranks that this survivor knows to be lost. The survivor waits
// for all others until the deadline and then goes on without them. If a rank dies meanwhile, the
// survivors agree again in another round: the result has only ranks that were alive when all had
// agreed. A rank that comes after the decision gets kAborted. All survivors must pass a membership
// of the same group; several groups of a job may rejoin at the same time. A rank may still die
// before Communicator::connect() has ended, which then fails on all ranks: call rejoin() again with
// the new Membership, or use rejoin_group() (comm/groups/rejoin_group.h), which does so.
CADRE_EXPORT Result<Membership> rejoin(os::System& system, const Membership& previous,
                                       std::span<const Rank> lost, Deadline deadline);

}  // namespace cadre
