// A blocking engine for tests. It exchanges bytes with fake peers, and a test can count, drop,
// change, delay or fail any collective in one function (on_call).
//
// Threads: those of Backend; FakeCalls from any thread. Blocking: as long as the peers and on_call
// block. Lifetime: shares the peers and FakeCalls with the test. Errors: those of the peers and of
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
  const OpKind called;    // kAllocate if an allocation of symmetric memory runs the collective
  Collective collective;  // on_call may change it before it calls pass_on()
  // Runs `collective` with the peers, including the changes that on_call has made to it.
  std::function<Status()> pass_on;
};

// Has the on_call function of a test, and a log of the calls. The engines of several ranks may
// share one object.
class FakeCalls {
 public:
  using OnCall = std::function<Status(FakeCall& call)>;

  FakeCalls() = default;
  // `on_call` is called instead of each collective. It runs the collective by call.pass_on(), or
  // drops it:
  //   count   ++n; return call.pass_on();
  //   drop    return {};
  //   change  call.collective.reduction = ReduceOp::kSum; return call.pass_on();
  //   delay   wait; return call.pass_on();
  //   fail    return Error(...);
  explicit FakeCalls(OnCall on_call) : on_call_(std::move(on_call)) {}

  // Sets the on_call function for all later collectives. REQUIRES: the groups have no pending
  // operations.
  void set_on_call(OnCall on_call) { on_call_ = std::move(on_call); }
  // Returns the calls in order, as texts such as "all_reduce(sum, float32 x 12)".
  std::vector<std::string> log() const;
  void clear_log();
  // Called by the engines: runs one collective through on_call.
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

// Returns a factory of fake engines, for CommunicatorOptions::backend.
BackendFactory fake_backend(std::shared_ptr<FakePeers> peers,
                            std::shared_ptr<FakeCalls> calls = std::make_shared<FakeCalls>());

}  // namespace cadre::testing
