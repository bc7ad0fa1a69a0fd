// Runs ranks as threads of a test, each with a group over a real Communicator, and small models to
// train on them.
//
// Threads: one for each rank. Blocking: until all ranks have ended; every operation of a rank ends
// within kRankTimeout. Errors: what a rank throws is returned with its rank.
#pragma once

#include <ATen/Parallel.h>
#include <torch/nn.h>
#include <torch/types.h>

#include <functional>
#include <memory>
#include <string>

#include "cadre/base/log.h"
#include "cadre/comm/communicator.h"
#include "cadre/group/process_group.h"
#include "cadre/os/system.h"
#include "cadre/store/hash_store.h"
#include "cadre/testing/ranks.h"

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

// Rows [begin, end) of a batch that belong to `rank`: shares differ by one row at most.
struct Share {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

inline Share share_of(int64_t batch, int rank, int world_size) {
  return {batch * rank / world_size, batch * (rank + 1) / world_size};
}

}  // namespace cadre::testing
