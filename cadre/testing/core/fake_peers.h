// The other ranks for fake engines: they are threads of this process, or their inputs are computed
// by a formula.
//
// Threads: run() from one thread of each rank at a time. Blocking: RanksInProcess::run(), until all
// ranks have called it, until the deadline of the operation, or until the group's Interrupt is
// raised, if there is one. Lifetime: shared by the engines of all ranks. Errors: those of Backend:
// kTimeout, kAborted, and kInvalidArgument on all ranks if their calls mismatch. For tests only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/collective/backend.h"
#include "cadre/core/collective/collective.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/collective/part_table.h"
#include "cadre/core/os/interrupt.h"
#include "cadre/core/os/system.h"

namespace cadre::testing {

// What an engine knows about its own rank.
struct FakeRank {
  std::string group;
  Rank rank;
  int world_size = 1;
  os::System& system;
  const os::Interrupt* interrupt = nullptr;  // if null, run() cannot be aborted
};

// Computes one collective from the calls of all ranks, which are in rank order. Reduces in rank
// order, as the host engine does. REQUIRES: each call is valid (validate()), all fingerprints are
// equal, and the sizes of the parts match.
void compute_collective(std::span<const Collective* const> calls);

class FakePeers {
 public:
  virtual ~FakePeers() = default;
  // Removes capabilities that these peers do not support.
  virtual void restrict(Capabilities&) const {}
  virtual Status run(const FakeRank& self, const OpContext& op, const Collective& collective) = 0;
};

// Peers that are threads of this process. Groups with different names are independent.
class RanksInProcess final : public FakePeers {
 public:
  Status run(const FakeRank& self, const OpContext& op, const Collective& collective) override;

 private:
  struct Arrival {
    const Collective* collective = nullptr;  // the rank's call while it waits (borrowed), else null
    std::optional<Fingerprint> fingerprint;  // kept after the rank has returned
    os::Waiter* waiter = nullptr;
  };
  // One call of a collective by all ranks. It exists from the first rank's call until the last rank
  // has returned.
  struct PendingCall {
    std::vector<Arrival> arrivals;  // indexed by rank
    int num_left = 0;
    bool is_mismatched = false;
    bool is_done = false;
    std::optional<PartTable> parts;  // the sizes of the parts of an all_to_all_v
  };
  using Key = std::pair<std::string, uint64_t>;  // name of the group, number of the operation

  // REQUIRES: the mutex is locked.
  static void arrive(PendingCall& pending, const FakeRank& self);
  static Status result_of(const PendingCall& pending, const FakeRank& self, const OpContext& op);
  Status wait(const FakeRank& self, const OpContext& op, const PendingCall& pending,
              os::Waiter& waiter);

  std::mutex mutex_;
  std::map<Key, PendingCall> pending_;
};

// The peers of rank 0 in tests that run only this rank. A formula computes their inputs; derive
// from this class to change the formula.
class FormulaPeers : public FakePeers {
 public:
  void restrict(Capabilities& can) const override;
  Status run(const FakeRank& self, const OpContext& op, const Collective& collective) override;

 protected:
  // Returns the input of rank r = `peer`, computed from that of rank 0: r + 1 times rank 0's values
  // for a reduction of floating-point values, and rank 0's values otherwise.
  virtual std::vector<std::byte> input_of(Rank peer, const Collective& collective) const;
};

}  // namespace cadre::testing
