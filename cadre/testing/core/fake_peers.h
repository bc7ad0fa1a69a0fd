// Simulates the other ranks for the engines of tests: they are threads of this process, or a
// formula.
//
// Threads: run() from one thread of each rank at a time. Blocking: RanksInProcess::run(), until all
// ranks have called it, until the deadline of the operation, or until the group's Interrupt if
// there is one. Lifetime: shared by the engines of all ranks. Errors: those of Backend: kTimeout,
// kAborted, and kInvalidArgument on all ranks for a mismatch. For tests only.
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

// The facts that an engine knows about its own rank.
struct FakeRank {
  std::string group;
  Rank rank;
  int world_size = 1;
  os::System& system;
  const os::Interrupt* interrupt = nullptr;  // if null, run() cannot be aborted
};

// Computes one collective from the calls of all ranks, in rank order. Reduces in rank order, as the
// host engine does. REQUIRES: each call is valid (validate()), fingerprints are equal, and parts
// fit.
void compute_collective(std::span<const Collective* const> calls);

class FakePeers {
 public:
  virtual ~FakePeers() = default;
  // Removes from full_capabilities() those that peers of this kind do not have.
  virtual void restrict(Capabilities&) const {}
  virtual Status run(const FakeRank& self, const OpContext& op, const Collective& collective) = 0;
};

// Peers that are threads of this process. Groups with different names are independent.
class RanksInProcess final : public FakePeers {
 public:
  Status run(const FakeRank& self, const OpContext& op, const Collective& collective) override;

 private:
  struct Arrival {
    const Collective* collective =
        nullptr;  // the rank's call while it waits, borrowed; null at other times
    std::optional<Fingerprint> fingerprint;  // kept when the rank has left the call
    os::Waiter* waiter = nullptr;
  };
  // A call of a collective. It exists from the first rank's call until the last rank has returned.
  struct PendingCall {
    std::vector<Arrival> arrivals;  // arrivals[r] is of rank r
    int num_left = 0;
    bool is_mismatched = false;
    bool is_done = false;
    std::optional<PartTable> parts;  // parts of an all_to_all_v
  };
  using Key = std::pair<std::string, uint64_t>;  // group, number

  // REQUIRES: the mutex is locked.
  static void arrive(PendingCall& pending, const FakeRank& self);
  static Status result_of(const PendingCall& pending, const FakeRank& self, const OpContext& op);
  Status wait(const FakeRank& self, const OpContext& op, const PendingCall& pending,
              os::Waiter& waiter);

  std::mutex mutex_;
  std::map<Key, PendingCall> pending_;
};

// The peers of rank 0 in tests of one rank, computed by a formula. Derive from it for other peers.
class FormulaPeers : public FakePeers {
 public:
  void restrict(Capabilities& can) const override;
  Status run(const FakeRank& self, const OpContext& op, const Collective& collective) override;

 protected:
  // Returns the input of another rank r, computed from that of rank 0. Here it is r + 1 times rank
  // 0's values in a reduction of floating-point values, and equal to rank 0's otherwise.
  virtual std::vector<std::byte> input_of(Rank peer, const Collective& collective) const;
};

}  // namespace cadre::testing
