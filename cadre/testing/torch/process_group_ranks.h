// Runs ranks as threads of a test, each with a group over a real Communicator.
//
// Threads: one for each rank. Blocking: until all ranks have ended; every operation of a rank ends
// within kRankTimeout. Errors: what a rank throws is returned with its rank.
#pragma once

#include <ATen/Parallel.h>

#include <functional>
#include <memory>
#include <string>

#include "cadre/core/base/log.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

inline constexpr Duration kRankTimeout = std::chrono::seconds(20);

// `body(group, output)`: what it writes to `output` is the rank's in the result. `log`: of all
// groups, if it is not null.
inline RanksResult run_groups(int world_size,
                              const std::function<void(const ProcessGroup&, std::string&)>& body,
                              const std::shared_ptr<LogSink>& log = nullptr,
                              TransportChoice transport = TransportChoice::kAuto) {
  const std::unique_ptr<os::System> system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  return run_ranks_as_threads(world_size, [&](RankContext& context) {
    at::set_num_threads(1);
    const Membership membership{.rank = context.rank,
                                .world_size = world_size,
                                .store = world_size > 1 ? store : nullptr,
                                .job_token = "test"};
    const ProcessGroup group(Communicator::connect(
        context.system, membership, {.timeout = kRankTimeout, .transport = transport, .log = log},
        context.system.deadline_in(kRankTimeout)));
    body(group, context.output);
    group.close();
  });
}

// For a body that writes no output.
inline RanksResult run_groups(int world_size, const std::function<void(const ProcessGroup&)>& body,
                              TransportChoice transport = TransportChoice::kAuto) {
  return run_groups(
      world_size, [&](const ProcessGroup& group, std::string&) { body(group); }, nullptr,
      transport);
}

}  // namespace cadre::testing
