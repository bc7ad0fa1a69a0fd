// The fixture of the tests of groups: each test runs over shared memory and over TCP. The ranks are
// threads with one native System and a store of their own.
//
// Threads: run() starts one for each rank. Blocking: until all ranks have ended.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::RankContext;
using testing::require;

inline constexpr Duration kGroupsBudget = seconds(20);

class GroupsTest : public ::testing::TestWithParam<TransportChoice> {
 protected:
  using Body = std::function<void(RankContext&, Communicator&)>;

  void run(int world_size, const Body& body, Duration timeout = kGroupsBudget) {
    const auto result = testing::run_ranks_as_threads(world_size, [&](RankContext& context) {
      CommunicatorOptions options;
      options.transport = GetParam();
      options.timeout = timeout;
      const auto world = Communicator::connect(
          context.system, {context.rank, context.world_size, 1, store_, "token"}, options,
          soon(context));
      body(context, *world);
      world->close(soon(context));
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
  static Deadline soon(RankContext& context) { return context.system.deadline_in(kGroupsBudget); }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  const std::shared_ptr<HashStore> store_ = std::make_shared<HashStore>(*system_);
};

inline std::string name_of_transport(const ::testing::TestParamInfo<TransportChoice>& test) {
  return test.param == TransportChoice::kTcp ? "Tcp" : "SharedMemory";
}

inline Bytes bytes_of(std::vector<int64_t>& values) {
  return std::as_writable_bytes(std::span(values));
}

inline Monitor& monitor_of(const Communicator& group) {
  return *CommunicatorParts::impl_of(group).monitor;
}

inline void await(RankContext& context, std::string_view what,
                  const std::function<bool()>& is_met) {
  const Deadline deadline = context.system.deadline_in(kGroupsBudget);
  while (!is_met()) {
    require(!deadline.has_passed(context.system.now()),
            format("timed out while waiting for: {}", what));
    context.system.make_waiter()->park(context.system.deadline_in(milliseconds(1)));
  }
}

// Waits until this rank is informed that `rank` has left the group in an orderly way (close()).
inline void await_leave(RankContext& context, const Communicator& group, Rank rank) {
  await(context, "a leave", [&] {
    return monitor_of(group).peers()[static_cast<size_t>(rank.value)].left_after.has_value();
  });
}

// Returns the offset, in this rank's slice of the host memory, at which the next allocation would
// begin.
inline size_t next_offset(const Communicator& world) {
  HostMemory& memory = *CommunicatorParts::impl_of(world).fabric->host_memory();
  return memory.allocate({.num_bytes = 1}).value_or_throw().place().offset;
}

}  // namespace cadre
