// Tests processes that map each other's shards. A rank is killed, is stopped or leaves, while it
// writes its shards or at other times; or one rank cannot map the memory. Also counts the pages
// that the parameters take.
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <array>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/torch/disturbed_job.h"
#include "cadre/testing/torch/shard_training.h"

namespace cadre {
namespace {

using testing::DisturbedRank;
using ::testing::HasSubstr;
using testing::kVictim;
using testing::RankContext;
using testing::require;
using testing::ShardedTraining;
using testing::ShardedTrainingOptions;
using torch::Tensor;

enum class Place {
  kInItsWrite,
  kInAllWrites,      // the other ranks also write, until they notice that the victim is lost
  kBeforeTheUpdate,  // the victim has ended its backward
  kAfterTheUpdate,   // after the update, before the victim reads parameters again
};

struct MappedFailureCase {
  int world_size;
  Place place;
  int signal;  // 0: the rank leaves the group in an orderly way
};

std::string mapped_name_of(const ::testing::TestParamInfo<MappedFailureCase>& info) {
  const MappedFailureCase& test = info.param;
  const std::string place = test.place == Place::kInItsWrite        ? "in_its_write"
                            : test.place == Place::kInAllWrites     ? "in_all_writes"
                            : test.place == Place::kBeforeTheUpdate ? "before_the_update"
                                                                    : "after_the_update";
  return format("{}_{}_of_{}",
                test.signal == SIGKILL   ? "kill"
                : test.signal == SIGSTOP ? "stop"
                                         : "leave",
                place, test.world_size);
}

ShardedTrainingOptions mapped_training() {
  ShardedTrainingOptions options{.widths = {60, 70, 50}};
  options.flat.form = ShardForm::kMapped;
  return options;
}

bool is_in_the_write(Place place) {
  return place == Place::kInItsWrite || place == Place::kInAllWrites;
}

void wait_for_the_loss(const ProcessGroup& group) {
  os::System& system = group.communicator().system();
  const Deadline end = system.deadline_in(std::chrono::seconds(10));
  while (group.communicator().lost_ranks().empty() && !end.has_passed(system.now())) {
    testing::nap(group, std::chrono::milliseconds(1));
  }
}

// Trains; the victim is disturbed in its second step. On the survivors this function throws.
void train_with_a_victim(const DisturbedRank& self, const ProcessGroup& group,
                         ShardedTraining& training, Place place) {
  training.train(1);
  const auto disturb = [&] {
    if (!self.is_victim()) return;
    if (self.job.signal != 0) self.disturb_self();
    group.close();
    throw Error(ErrorCode::kAborted, "the victim has left");
  };
  training.backward(1);
  if (place == Place::kBeforeTheUpdate) disturb();
  if (is_in_the_write(place)) {
    training.optimizer->pause = [&] {
      disturb();
      if (place == Place::kInAllWrites) wait_for_the_loss(group);
    };
  }
  training.update();
  if (place == Place::kAfterTheUpdate) disturb();
  training.train(1);
}

// Checks that every later use of the parameters throws the same failure and returns no value.
void require_guarded(ShardedTraining& training, const Error& error) {
  const std::string first = format("{}: {}", to_string(error.code()), error.message());
  // A wrapper reshards its units after a failed pass, so the test does so, too.
  for (const auto& unit : training.units) testing::failure_of([&] { unit->reshard(); });
  for (int times = 0; times < 2; ++times) {
    const std::string again = testing::failure_of([&] { training.evaluate(0); });
    require(again.find(std::string(to_string(error.code()))) == 0, first + "\n  then: " + again);
  }
  require(!testing::failure_of([&] { training.update(); }).empty(),
          "an update after the failure must throw");
  for (const auto& unit : training.units) {
    for (const NamedTensor& parameter : unit->parameters()) {
      const std::string touched = testing::failure_of([&] { parameter.tensor.sum(); });
      require(touched.find(unit->name()) != std::string::npos, "guarded: " + touched);
    }
    const torch::NoGradGuard no_grad;
    if (unit->values(0).numel() == 0) continue;
    const std::string written = testing::failure_of([&] { unit->values(0).zero_(); });
    require(written.find("Cadre's own step only") != std::string::npos, written);
  }
}

testing::FailureReport live_through(DisturbedRank& self, const ProcessGroup& group, Place place) {
  ShardedTraining training(group, mapped_training());
  require(training.units[0]->is_mapped(), "the unit is not mapped");
  return self.report_of([&] { train_with_a_victim(self, group, training, place); },
                        [&](const Error& error) {
                          if (self.is_victim()) return;
                          require(error.details().culprit == Rank(kVictim), error.message());
                          require_guarded(training, error);
                        });
}

class MappedFailureTest : public ::testing::TestWithParam<MappedFailureCase> {};

TEST_P(MappedFailureTest, EverySurvivorNamesTheOwnerAndNoValueIsTaken) {
  const MappedFailureCase& test = GetParam();
  const auto outcome =
      testing::run_disturbed({.world_size = test.world_size, .signal = test.signal},
                             testing::on_group([&](DisturbedRank& self, const ProcessGroup& group) {
                               return live_through(self, group, test.place);
                             }));
  for (const auto& [rank, message] : outcome.messages) {
    SCOPED_TRACE(rank);
    if (test.signal == 0) {
      // The victim itself reports its incomplete step, unless the others notice first that it has
      // left.
      EXPECT_THAT(message, ::testing::StartsWith("kCorruption: "));
      EXPECT_THAT(message, HasSubstr("rank 1"));
    } else if (is_in_the_write(test.place) && test.signal == SIGKILL) {
      EXPECT_THAT(message, ::testing::StartsWith("kCorruption: "));
      EXPECT_THAT(message,
                  HasSubstr("rank 1 was lost while it wrote its shards of parameters of unit 0 and "
                            "those of 1 more units, which may be half written (version 3). Resume "
                            "from the last snapshot."));
    } else if (test.signal == SIGSTOP) {
      EXPECT_THAT(message, ::testing::AnyOf(HasSubstr("kTimeout: "), HasSubstr("kAborted: ")));
      EXPECT_THAT(message, HasSubstr("waiting for rank 1 ("));
    } else {
      EXPECT_THAT(message, HasSubstr("kPeerLost: "));
    }
  }
}

std::vector<MappedFailureCase> mapped_cases() {
  std::vector<MappedFailureCase> cases;
  for (const Place place :
       {Place::kInItsWrite, Place::kInAllWrites, Place::kBeforeTheUpdate, Place::kAfterTheUpdate}) {
    cases.push_back({2, place, SIGKILL});
    cases.push_back({3, place, SIGKILL});
  }
  // A victim that is stopped or leaves is tested only while it writes; fsdp_mapped_failure_test.cpp
  // tests the other phases.
  cases.push_back({3, Place::kInItsWrite, SIGSTOP});
  cases.push_back({3, Place::kInItsWrite, 0});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, MappedFailureTest, ::testing::ValuesIn(mapped_cases()),
                         mapped_name_of);

// Returns the proportional set size, in bytes, of the mappings that overlap [begin, begin +
// num_bytes).
int64_t proportional_size_of(const void* begin, size_t num_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  std::ifstream smaps("/proc/self/smaps");
  bool is_inside = false;
  int64_t sum = 0;
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t from = 0;
    uintptr_t to = 0;
    char dash = 0;
    std::istringstream text(line);
    if (text >> std::hex >> from >> dash >> to && dash == '-') {
      is_inside = from < first + num_bytes && first < to;
    } else if (is_inside && line.starts_with("Pss:")) {
      sum += std::stoll(line.substr(4)) * 1024;
    }
  }
  return sum;
}

// All ranks read all parameters, but each page must exist only once on the host.
TEST(MappedMemoryTest, AHostHoldsTheParametersOnce) {
  constexpr int64_t kNumel = int64_t{4} << 20;  // 16 MiB
  constexpr int kWorldSize = 4;
  const auto result = testing::run_job(
      {.world_size = kWorldSize}, [](RankContext& context, const Membership& membership) {
        at::set_num_threads(1);
        const ProcessGroup group(testing::connect(context, membership, {}));
        Tensor weight = torch::ones({kNumel}).requires_grad_(true);
        shard::FlatParameters flat({{"weight", weight}}, group, {.form = ShardForm::kMapped});
        flat.unshard_async();
        flat.wait_unsharded();
        require(weight.detach().sum().item<float>() == kNumel, "a parameter has a wrong value");
        group.barrier();
        const auto bytes = static_cast<size_t>(kNumel) * sizeof(float);
        // Each page has one mapping on every rank, and a second one on the rank that owns it.
        const int64_t own = proportional_size_of(weight.const_data_ptr(), bytes);
        require(own > 0, "no page is mapped");
        require(own <= static_cast<int64_t>(bytes) / kWorldSize,
                format("{} bytes of one rank, of {} in all", own, bytes));
        // The limit of the committed memory includes the memory of the group itself.
        require(
            testing::committed_shared_bytes() < static_cast<int64_t>(bytes) + (int64_t{12} << 20),
            format("{} bytes in the segment", testing::committed_shared_bytes()));
        group.barrier();
        const Tensor sizes = torch::tensor({own}, torch::kLong);
        group.all_reduce(sizes);
        const auto sum = sizes[0].item<int64_t>();
        require(sum <= static_cast<int64_t>(bytes), format("{} bytes of all ranks", sum));
        require(sum >= static_cast<int64_t>(bytes) * kWorldSize / (kWorldSize + 1) - (1 << 20),
                format("{} bytes of all ranks", sum));
        flat.reshard();
        group.close();
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Fused kernels write through the address of the whole tensor; the protection must detect these
// accesses, too.
TEST(MappedMemoryTest, TheFusedOptimizersWriteInTheirUpdateOnly) {
  const auto result =
      testing::run_job({.world_size = 2}, [](RankContext& context, const Membership& membership) {
        at::set_num_threads(1);
        const ProcessGroup group(testing::connect(context, membership, {}));
        const Tensor weight = torch::ones({3000}).requires_grad_(true);
        shard::FlatParameters flat({{"weight", weight}}, group, {.form = ShardForm::kMapped});
        const std::vector<Tensor> leaves = {flat.values(0)};
        flat.values(0).mutable_grad() = torch::ones_like(flat.values(0));
        AdamW adamw(leaves);
        SGD sgd(leaves, 0.5);
        for (const std::string& failure : {testing::failure_of([&] { adamw.step(); }),
                                           testing::failure_of([&] { sgd.step(); })}) {
          require(failure.find("written by Cadre's own step only") != std::string::npos, failure);
        }
        ShardedOptimizer<SGD> sharded(testing::FencedLeaves{flat.fence(), leaves}, 0.5);
        sharded.step();
        flat.unshard_async();
        flat.wait_unsharded();
        require(torch::equal(weight, torch::full({3000}, 0.5)),
                "not every rank has updated its shard once");
        flat.reshard();
        group.close();
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// If one rank has too little address space for the mapping, all ranks must use gathered shards.
TEST(MappedMemoryTest, OneRankThatCannotMapDecidesForAll) {
  const auto result =
      testing::run_job({.world_size = 3}, [](RankContext& context, const Membership& membership) {
        at::set_num_threads(1);
        const ProcessGroup group(testing::connect(context, membership, {}));
        Tensor weight = torch::ones({int64_t{16} << 20}).requires_grad_(true);  // 64 MiB
        ShardedTraining training(group, mapped_training());
        training.train(1);
        std::ifstream statm("/proc/self/statm");
        size_t num_pages = 0;
        statm >> num_pages;
        rlimit before{};
        require(::getrlimit(RLIMIT_AS, &before) == 0, "getrlimit");
        if (context.rank == 1) {
          const rlimit limit{.rlim_cur = num_pages * 4096 + (size_t{32} << 20),
                             .rlim_max = before.rlim_max};
          require(::setrlimit(RLIMIT_AS, &limit) == 0, "setrlimit");
        }
        shard::FlatParametersOptions options{.form = ShardForm::kMapped};
        options.fence = training.units[0]->fence();
        shard::FlatParameters flat({{"weight", weight}}, group, options);
        require(::setrlimit(RLIMIT_AS, &before) == 0, "setrlimit");
        require(!flat.is_mapped(), "a rank still uses mapped shards");
        flat.unshard_async();
        flat.wait_unsharded();
        require(weight.detach().sum().item<float>() == static_cast<float>(weight.numel()),
                "its values");
        flat.reshard();
        training.train(2);  // the other units are still mapped, so training works
        group.close();
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
