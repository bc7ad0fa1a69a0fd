#include "cadre/testing/core/fake_backend.h"

#include <utility>

namespace cadre::testing {

std::vector<std::string> FakeCalls::log() const {
  const std::lock_guard lock(mutex_);
  return log_;
}

void FakeCalls::clear_log() {
  const std::lock_guard lock(mutex_);
  log_.clear();
}

Status FakeCalls::run(FakePeers& peers, const FakeRank& self, const OpContext& op,
                      const Collective& collective) {
  const OpDescriptor called = OpDescriptor::from_fingerprint(op.fingerprint());
  {
    const std::lock_guard lock(mutex_);
    log_.push_back(called.to_string());
  }
  FakeCall call{.rank = self.rank,
                .number = op.number,
                .called = called.kind,
                .collective = collective,
                .pass_on = {}};
  call.pass_on = [&] { return peers.run(self, op, call.collective); };
  return on_call_(call);
}

FakeBackend::FakeBackend(FakeRank self, std::shared_ptr<FakePeers> peers,
                         std::shared_ptr<FakeCalls> calls)
    : self_(std::move(self)), peers_(std::move(peers)), calls_(std::move(calls)) {}

Capabilities FakeBackend::capabilities() const {
  Capabilities can = full_capabilities("fake");
  peers_->restrict(can);
  return can;
}

Completion FakeBackend::submit(const OpContext& op, std::span<const Collective> collectives) {
  return run_in_order(op, collectives, [this](const OpContext& one, const Collective& collective) {
    return calls_->run(*peers_, self_, one, collective);
  });
}

BackendFactory fake_backend(std::shared_ptr<FakePeers> peers, std::shared_ptr<FakeCalls> calls) {
  return [peers, calls](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
    return std::unique_ptr<Backend>(
        std::make_unique<FakeBackend>(FakeRank{.group = setup.group,
                                               .rank = setup.rank,
                                               .world_size = setup.world_size,
                                               .system = setup.system,
                                               .interrupt = &setup.interrupt},
                                      peers, calls));
  };
}

}  // namespace cadre::testing
