// Where the engines of tests get the other ranks from: they are threads of this process, or a
// formula.
//
// Threads: run() from one thread of each rank at a time. Blocking: RanksInProcess::run(), until all
// ranks have called it, the deadline of the operation, or the group's Interrupt where one is given.
// Lifetime: shared by the engines of all ranks. Errors: as Backend: kTimeout, kAborted, and
// kInvalidArgument for a mismatch, on all ranks. For tests only.
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

// One rank of a group, as its engine knows it.
struct FakeRank {
  std::string group;
  Rank rank;
  int world_size = 1;
  os::System& system;
  const os::Interrupt* interrupt = nullptr;  // null: run() cannot be aborted
};

// Computes one collective, given that of each rank in rank order. Folds in rank order, as the host
// engine does. REQUIRES: validate() of each, equal fingerprints, parts that fit.
void compute_collective(std::span<const Collective* const> calls);

class FakePeers {
 public:
  virtual ~FakePeers() = default;
  // Those of full_capabilities() that peers of this kind do not have are taken out.
  virtual void restrict(Capabilities&) const {}
  virtual Status run(const FakeRank& self, const OpContext& op, const Collective& collective) = 0;
};

// The ranks are threads; groups with different names are independent.
class RanksInProcess final : public FakePeers {
 public:
  Status run(const FakeRank& self, const OpContext& op, const Collective& collective) override;

 private:
  struct Arrival {
    const Collective* collective =
        nullptr;  // borrowed from a rank that waits; null before and after
    std::optional<Fingerprint> fingerprint;  // kept when the rank has left
    os::Waiter* waiter = nullptr;
  };
  // A collective from the first rank that calls it until the last one has left it.
  struct PendingCall {
    std::vector<Arrival> arrivals;  // by rank
    int num_left = 0;
    bool is_mismatched = false;
    bool is_done = false;
    std::optional<PartTable> parts;  // for an all_to_all_v
  };
  using Key = std::pair<std::string, uint64_t>;  // group, number

  // Under the mutex.
  static void arrive(PendingCall& pending, const FakeRank& self);
  static Status result_of(const PendingCall& pending, const FakeRank& self, const OpContext& op);
  Status wait(const FakeRank& self, const OpContext& op, const PendingCall& pending,
              os::Waiter& waiter);

  std::mutex mutex_;
  std::map<Key, PendingCall> pending_;
};

// The other ranks of rank 0, for tests of one rank. Derive from it for other peers.
class FormulaPeers : public FakePeers {
 public:
  void restrict(Capabilities& can) const override;
  Status run(const FakeRank& self, const OpContext& op, const Collective& collective) override;

 protected:
  // The input of another rank, given rank 0's. As it is here: of a reduction, r + 1 times rank 0's
  // floating-point values; otherwise, and of integers, the same.
  virtual std::vector<std::byte> input_of(Rank peer, const Collective& collective) const;
};

}  // namespace cadre::testing
