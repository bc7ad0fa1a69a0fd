// Runs ranks as threads of a test, each with a ProcessGroup over a real Communicator.
//
// Threads: one for each rank. Blocking: until all ranks have ended; every operation of a rank ends
// within kRankTimeout. Errors: what a rank throws is returned with its rank.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/log.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/system.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {

inline constexpr Duration kRankTimeout = std::chrono::seconds(20);

// Calls `body(group, output)` on each rank. The result contains what the body wrote to `output`, by
// rank. `log` receives the log of all groups; it may be null.
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

// Does the same for a body that writes no output.
inline RanksResult run_groups(int world_size, const std::function<void(const ProcessGroup&)>& body,
                              TransportChoice transport = TransportChoice::kAuto) {
  return run_groups(
      world_size, [&](const ProcessGroup& group, std::string&) { body(group); }, nullptr,
      transport);
}

// Returns the message with which both ranks of a group of two refuse `wrap(module, group)`; it must
// be equal on both. make_module returns a pointer to a module with a layer `in`, whose weight must
// keep its memory and sizes. The group must work afterwards.
template <typename MakeModule, typename Wrap>
std::string refusal_of_both_ranks(const MakeModule& make_module, const Wrap& wrap) {
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    const auto module = make_module(group);
    const at::Tensor& weight = module->in->weight;
    const void* const memory = weight.const_data_ptr();
    const std::vector<int64_t> sizes = weight.sizes().vec();
    output = failure_of([&] { wrap(module, group); });
    require(weight.const_data_ptr() == memory, "it has its memory");
    require(weight.sizes() == sizes, "it is whole");
    const at::Tensor sum = at::ones({1});
    group.all_reduce(sum);
    require(sum.item<float>() == 2, "the group works");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(result.ranks[0].output, result.ranks[1].output);
  return result.ranks[0].output;
}

}  // namespace cadre::testing
