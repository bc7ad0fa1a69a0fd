// A blocking engine for tests. It moves bytes between fake peers, and a test can count, drop,
// change, delay or fail any collective in one function.
//
// Threads: those of Backend; FakeCalls from any. Blocking: as long as its peers and on_call block.
// Lifetime: shares its peers and its FakeCalls with the test. Errors: those of the peers and of
// on_call. For tests only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/collective/backend.h"
#include "cadre/core/comm/backend_factory.h"
#include "cadre/testing/core/fake_peers.h"

namespace cadre::testing {

// A collective that a fake engine was asked to run.
struct FakeCall {
  const Rank rank;        // the rank that calls the collective
  const uint64_t number;  // counts the group's collectives from 1
  const OpKind called;    // kAllocate, if the collective serves an allocation
  Collective collective;  // on_call may change it before it passes it on
  // Runs `collective`, as it is at the time of this call, on the peers.
  std::function<Status()> pass_on;
};

// Holds the on_call function of a test, and a log of the calls. The engines of several ranks may
// share it.
class FakeCalls {
 public:
  using OnCall = std::function<Status(FakeCall& call)>;

  FakeCalls() = default;
  // `on_call` runs in place of each collective. It passes the collective on unless it drops it:
  //   count   ++n; return call.pass_on();
  //   drop    return {};
  //   change  call.collective.reduction = ReduceOp::kSum; return call.pass_on();
  //   delay   wait; return call.pass_on();
  //   fail    return Error(...);
  explicit FakeCalls(OnCall on_call) : on_call_(std::move(on_call)) {}

  // Sets the function that runs in place of each later collective. REQUIRES: the groups have no
  // pending operations.
  void set_on_call(OnCall on_call) { on_call_ = std::move(on_call); }
  // Returns, for example, "all_reduce(sum, float32 x 12)", in the order of the calls.
  std::vector<std::string> log() const;
  void clear_log();
  // Runs one collective of a fake engine.
  Status run(FakePeers& peers, const FakeRank& self, const OpContext& op,
             const Collective& collective);

 private:
  OnCall on_call_ = [](FakeCall& call) { return call.pass_on(); };
  mutable std::mutex mutex_;
  std::vector<std::string> log_;
};

class FakeBackend final : public Backend {
 public:
  FakeBackend(FakeRank self, std::shared_ptr<FakePeers> peers, std::shared_ptr<FakeCalls> calls);

  Capabilities capabilities() const override;
  Completion submit(const OpContext& op, std::span<const Collective> collectives) override;

 private:
  const FakeRank self_;
  const std::shared_ptr<FakePeers> peers_;
  const std::shared_ptr<FakeCalls> calls_;
};

// Returns a value for CommunicatorOptions::backend.
BackendFactory fake_backend(std::shared_ptr<FakePeers> peers,
                            std::shared_ptr<FakeCalls> calls = std::make_shared<FakeCalls>());

}  // namespace cadre::testing
