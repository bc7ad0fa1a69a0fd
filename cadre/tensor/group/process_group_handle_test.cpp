// Tests properties of a group other than its results: rank and backend, the lifetime of memory in
// use, and whether the remedies that its errors name keep the result.
#include <ATen/native/Resize.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

TEST(ProcessGroup, SaysWhatMovesItsBytes) {
  for (const auto& [choice, name] :
       {std::pair(TransportChoice::kAuto, "host"), std::pair(TransportChoice::kTcp, "net")}) {
    const auto result = run_groups(
        2,
        [&, name = name](const ProcessGroup& group) {
          const std::string_view actual = group.communicator().backend_name();
          require(actual == name, actual);
        },
        choice);
    EXPECT_TRUE(result.ok()) << result.failures();
  }
  EXPECT_TRUE(run_groups(1, [](const ProcessGroup& group) {
                require(group.communicator().backend_name() == "solo", "alone");
              }).ok());
}

// A Rank can be used as a number: as a value, in comparisons, and as an argument of printf.
TEST(ProcessGroup, ItsRankIsANumber) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    require(torch::full({2}, group.rank())[0].item<int>() == group.rank(), "full");
    require(std::max(group.rank(), 1) == 1, "max");
    std::array<char, 16> text{};
    std::snprintf(text.data(), text.size(), "%d of %d", group.rank(), group.world_size());
    require(text[0] == '0' + group.rank(), text.data());
    const Rank rank = group.rank();
    require(rank == group.rank(), "as a Rank");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// An allocator that records when its memory is freed.
class WatchedAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    void* data = std::malloc(num_bytes);
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }

  static inline std::atomic<int> num_freed = 0;

 private:
  static void release(void* data) {
    if (data != nullptr) ++num_freed;
    std::free(data);
  }
};

// Returns 100 float32 ones, in memory of a WatchedAllocator.
Tensor watched_ones() {
  static WatchedAllocator allocator;
  c10::Storage storage(c10::Storage::use_byte_size_t{}, 400, &allocator, /*resizable=*/true);
  return torch::empty({0}).set_(storage, 0, {100}, {1}).fill_(1);
}

// Rank 1 starts the operation after rank 0 has released its tensors.
TEST(ProcessGroup, MemoryOfAnOperationInFlightIsNotFreed) {
  const std::vector<std::pair<const char*, std::function<void(Tensor&)>>> ways = {
      {"emptied", [](Tensor& t) { t.storage().unsafeGetStorageImpl()->set_data_ptr({}); }},
      {"shrunk",
       [](Tensor& t) { at::native::resize_bytes_cpu(t.storage().unsafeGetStorageImpl(), 0); }},
      {"grown", [](Tensor& t) { t.resize_({5000}); }},
      {"given other memory", [](Tensor& t) { t.set_data(torch::zeros({100})); }},
      {"dropped", [](Tensor& t) { t = Tensor(); }}};
  for (const auto& [name, take_away] : ways) {
    std::promise<void> taken;
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      if (group.rank() == 1) {
        require(taken.get_future().wait_for(testing::kRankTimeout) == std::future_status::ready,
                "too late");
        group.all_reduce(torch::ones({100}));
        return;
      }
      Tensor tensor = watched_ones();
      const int before = WatchedAllocator::num_freed;
      const Work work = group.all_reduce_async(tensor);
      take_away(tensor);
      const int in_flight = WatchedAllocator::num_freed;
      taken.set_value();
      work.wait();
      require(in_flight == before, std::string("freed in flight when ") + name);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// For an input the error recommends a temporary copy. For an output a temporary copy would lose the
// result.
TEST(ProcessGroup, ItsRemediesKeepTheResult) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const auto expect = [](const std::function<void()>& call, const std::string& remedy) {
      const std::string failure = failure_of(call);
      require(failure.find(remedy) != std::string::npos, "expected " + remedy + ": " + failure);
    };
    const Tensor rows = torch::zeros({4, 4}).t();
    const Tensor plain = torch::zeros({4, 4});
    const std::string in_place =
        "is not contiguous; keep copy = tensor.contiguous(), pass the copy and, when the operation "
        "is done, call tensor.copy_(copy), or call the operation without _async";
    expect([&] { (void)group.all_reduce_async(rows); }, in_place);
    expect([&] { (void)group.broadcast_async(rows); }, in_place);
    expect([&] { (void)group.reduce_async(rows); }, in_place);
    expect([&] { (void)group.recv_async(rows, 0); }, in_place);
    expect([&] { group.all_gather(plain, rows); }, "is not contiguous; pass input.contiguous()");
    expect([&] { group.all_gather(rows, plain); },
           "keep copy = output.contiguous(), pass the copy and, when the operation is done, call "
           "output.copy_(copy)");
    const Tensor negated = torch::imag(torch::zeros({2}, torch::kComplexFloat).conj());
    expect([&] { group.all_reduce(negated); }, "keep copy = tensor.resolve_neg(), pass the copy");
    expect([&] { group.send(negated, 0); }, "pass input.resolve_neg()");
    expect([&] { group.all_reduce(torch::zeros({1}).expand({4})); },
           "keep copy = tensor.clone(), pass the copy and use that");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Three ranks are on the first host and one is on the second, in virtual time.
TEST(ProcessGroup, KnowsOnWhichHostsItsRanksRun) {
  sim::Simulator simulator(1, {.ranks_per_host = {3, 1}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const sim::SimResult result = simulator.run([&](os::System& system, int rank) {
    at::set_num_threads(1);
    CommunicatorOptions options;
    options.listen_host = rank == 3 ? "10.0.0.2" : "10.0.0.1";
    const ProcessGroup world(Communicator::connect(
        system, {.rank = rank, .world_size = 4, .store = store, .job_token = "test"}, options,
        system.deadline_in(testing::kRankTimeout)));
    const auto place = [](const ProcessGroup& group) {
      return std::vector<int>{group.local_rank(), group.local_world_size(), group.node_rank(),
                              group.num_nodes()};
    };
    require(place(world) == (rank == 3 ? std::vector{0, 1, 1, 2} : std::vector{rank, 3, 0, 2}),
            "in the world");
    require(world.host() == system.host().name, world.host());
    // The members are ranks 3, 1 and 2, in this order. So the group's first host is the second host
    // of the world.
    if (const auto group = world.new_group({3, 1, 2})) {
      require(
          place(*group) == (rank == 3 ? std::vector{0, 1, 0, 2} : std::vector{rank - 1, 2, 1, 2}),
          "in a subgroup");
      group->close();
    }
    world.close();
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
}

// Two threads are the ranks of a job that was started without a launcher.
TEST(ProcessGroup, IsMadeOfWhatTheProgramSaysWithoutALauncher) {
  const testing::TemporaryFolder folder;
  const auto result = testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
    const ProcessGroup world = init_process_group({.rank = context.rank,
                                                   .world_size = 2,
                                                   .init_method = "file://" + folder.file("job"),
                                                   .backend = "net",
                                                   .timeout = testing::kRankTimeout});
    require(world.communicator().backend_name() == "net", "the engine");
    const Tensor sum = torch::full({1}, world.rank() + 1);
    world.all_reduce(sum);
    require(sum.item<int>() == 3, "the sum");
    world.close();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(failure_of([] { (void)init_process_group({.backend = "nccl"}); }),
              ::testing::HasSubstr("InitOptions::backend is \"nccl\"; pass \"host\" or \"net\""));
}

// Rank 1 is no member of the new group, and does not make the call.
TEST(ProcessGroup, IsMadeByItsMembersAlone) {
  const auto result = run_groups(3, [](const ProcessGroup& world) {
    const NewGroupOverStoreOptions options{
        .store = world.communicator().membership().store, .id = "pair", .name = "the pair"};
    if (world.rank() != 1) {
      const ProcessGroup pair = world.new_group_over_store({2, 0}, options);
      require(pair.rank() == (world.rank() == 2 ? 0 : 1) && pair.world_size() == 2, "its ranks");
      require(pair.name() == "the pair", pair.name());
      const Tensor sum = torch::full({1}, world.rank());
      pair.all_reduce(sum);
      require(sum.item<int>() == 2, "sum");
      pair.close();
    }
    require(world.communicator().num_collectives() == 0, "nothing of the world");
    const std::string failure = failure_of([&] {
      (void)world.new_group_over_store({(world.rank() + 1) % 3, (world.rank() + 2) % 3}, options);
    });
    require(failure.find("this rank is not in the list") != std::string::npos, failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
