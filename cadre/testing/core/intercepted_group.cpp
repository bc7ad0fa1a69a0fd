#include "cadre/testing/core/intercepted_group.h"

#include <utility>
#include <vector>

#include "cadre/core/comm/communicator_impl.h"
#include "cadre/testing/core/fake_peers.h"

namespace cadre::testing {
namespace {

// Peers that are reached through the group's real engine.
class PeersOfEngine final : public FakePeers {
 public:
  explicit PeersOfEngine(std::unique_ptr<Backend> engine) : engine_(std::move(engine)) {}

  void restrict(Capabilities& can) const override { can = engine_->capabilities(); }
  Status run(const FakeRank&, const OpContext& op, const Collective& collective) override {
    // The group's engine is a blocking one, so the status is final when submit() returns.
    return engine_->submit(op, {&collective, 1}).status();
  }

 private:
  const std::unique_ptr<Backend> engine_;
};

}  // namespace

void intercept(Communicator& group, std::shared_ptr<FakeCalls> calls) {
  if (group.num_collectives() > 0) {
    throw Error(ErrorCode::kInvalidArgument, "intercept: the group has run operations already");
  }
  Communicator::Impl& impl = CommunicatorParts::impl_of(group);
  // A group without an engine has one rank, and so no peers: its FormulaPeers are never called.
  std::shared_ptr<FakePeers> peers = std::make_shared<FormulaPeers>();
  std::unique_ptr<Backend> engine = impl.engines.exchange_host(nullptr);
  if (engine != nullptr) peers = std::make_shared<PeersOfEngine>(std::move(engine));
  impl.engines.exchange_host(std::make_unique<FakeBackend>(FakeRank{.group = group.name(),
                                                                    .rank = impl.rank,
                                                                    .world_size = impl.world_size,
                                                                    .system = impl.system,
                                                                    .interrupt = nullptr},
                                                           std::move(peers), std::move(calls)));
  // The queue and the symmetric heap still refer to the previous engine, so they are made again.
  const bool has_memory = impl.engines.host_capabilities().shares_memory;
  impl.queue->close();
  impl.heap = std::make_unique<SymmetricHeap>(SymmetricHeap::Parts{
      impl.system, impl.rank, impl.world_size, impl.engines.host(),
      has_memory ? impl.fabric->host_memory() : nullptr,
      has_memory ? impl.fabric->slots_of(impl.members.ranks) : std::vector<int>(),
      impl.signal_waits, impl.fork_guard, impl.one_sided_access});
  impl.runner = std::make_unique<CollectiveRunner>(
      CollectiveRunner::Parts{impl.system, *impl.monitor, *impl.recorder, impl.engines,
                              impl.heap.get(), impl.options.timeout});
  impl.queue = std::make_shared<OperationQueue>(impl.system, *impl.runner, impl.fork_guard,
                                                impl.options.log);
}

}  // namespace cadre::testing
