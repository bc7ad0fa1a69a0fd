// Real processes that map each other's shards: a rank is killed, stopped or leaves inside its write
// of the shards or outside of it, one rank cannot map, and the pages of parameters are counted.
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
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/shard_training.h"
#include "cadre/testing/torch/victim.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::kLimit;
using testing::kStopTimeout;
using testing::kVictim;
using testing::RankContext;
using testing::require;
using testing::ShardedTraining;
using testing::ShardedTrainingOptions;
using torch::Tensor;

enum class Place {
  kInItsWrite,
  kBeforeTheUpdate,  // after its backward
  kAfterTheUpdate,   // before it uses parameters again
};

struct MappedFailureCase {
  int world_size;
  Place place;
  int signal;  // 0: the rank leaves in good order
};

std::string mapped_name_of(const ::testing::TestParamInfo<MappedFailureCase>& info) {
  const MappedFailureCase& test = info.param;
  const std::string place = test.place == Place::kInItsWrite        ? "in_its_write"
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

// The victim is disturbed in its second step. Throws, on the survivors.
void train_with_a_victim(RankContext& context, const ProcessGroup& group, ShardedTraining& training,
                         const MappedFailureCase& test, const std::string& moment_file) {
  training.train(1);
  const auto disturb = [&] {
    if (context.rank != kVictim) return;
    if (test.signal != 0) testing::disturb_self(context, test.signal, moment_file);
    group.close();
    throw Error(ErrorCode::kAborted, "the victim has left");
  };
  training.backward(1);
  if (test.place == Place::kBeforeTheUpdate) disturb();
  if (test.place == Place::kInItsWrite) training.optimizer->pause = disturb;
  training.update();
  if (test.place == Place::kAfterTheUpdate) disturb();
  training.train(1);
}

// Every later use gives the same failure, and no value.
void require_guarded(ShardedTraining& training, const Error& error) {
  const std::string first = format("{}: {}", to_string(error.code()), error.message());
  // As a wrapper does when a pass has failed.
  for (const auto& unit : training.units) testing::failure_of([&] { unit->reshard(); });
  for (int times = 0; times < 2; ++times) {
    const std::string again = testing::failure_of([&] { training.evaluate(0); });
    require(again.find(std::string(to_string(error.code()))) == 0, first + "\n  then: " + again);
  }
  require(!testing::failure_of([&] { training.update(); }).empty(), "no step");
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

void live_through(RankContext& context, const Membership& membership, const MappedFailureCase& test,
                  const std::string& moment_file) {
  at::set_num_threads(1);
  torch::ones({4}, torch::requires_grad()).sum().backward();  // what libtorch starts once
  const testing::Resources before = testing::count_resources();
  int victim_pid = 0;
  {
    CommunicatorOptions options;
    options.timeout = test.signal == SIGSTOP ? kStopTimeout : Duration(seconds(30));
    const ProcessGroup group(testing::connect(context, membership, options));
    victim_pid = group.communicator().peers()[kVictim].pid;
    ShardedTraining training(group, mapped_training());
    require(training.units[0]->is_mapped(), "it is mapped");
    try {
      train_with_a_victim(context, group, training, test, moment_file);
      require(false, "no failure");
    } catch (const Error& error) {
      if (context.rank == kVictim) return;
      testing::FailureReport report;
      report.raised = context.system.now();
      report.message = format("{}: {}", to_string(error.code()), error.message());
      context.output = testing::to_text(report);
      require(error.details().culprit == Rank(kVictim), report.message);
      require_guarded(training, error);
    }
    group.close();
  }
  if (context.rank == 0 && test.signal == SIGSTOP) ::kill(victim_pid, SIGKILL);
  const std::string left = testing::leftovers_since(before);
  require(left.empty(), left);
}

class MappedFailureTest : public ::testing::TestWithParam<MappedFailureCase> {};

TEST_P(MappedFailureTest, EverySurvivorNamesTheOwnerAndNoValueIsTaken) {
  const MappedFailureCase& test = GetParam();
  const testing::Resources before = testing::count_resources();
  const testing::TemporaryFolder folder;
  const std::string moment_file = folder.file("moment");
  testing::JobOptions options{.world_size = test.world_size};
  options.processes.time_limit = seconds(60);
  const auto result =
      testing::run_job(options, [&](RankContext& context, const Membership& membership) {
        live_through(context, membership, test, moment_file);
      });
  for (int rank = 0; rank < test.world_size; ++rank) {
    if (rank == kVictim) continue;
    const auto& outcome = result.ranks[static_cast<size_t>(rank)];
    ASSERT_EQ(outcome.failure, "") << "rank " << rank << ", of all:\n" << result.failures();
    const testing::FailureReport report = testing::parse_report(outcome.output);
    SCOPED_TRACE(report.message);
    if (test.signal == 0) {
      // It tells of its broken step itself, unless the others see first that it has left.
      EXPECT_THAT(report.message, ::testing::StartsWith("kCorruption: "));
      EXPECT_THAT(report.message, HasSubstr("rank 1"));
    } else if (test.place == Place::kInItsWrite && test.signal == SIGKILL) {
      EXPECT_THAT(report.message, ::testing::StartsWith("kCorruption: "));
      EXPECT_THAT(report.message,
                  HasSubstr("rank 1 was lost while it wrote its shards of parameters of unit 0 and "
                            "those of 1 more units, which may be half written (version 3). Resume "
                            "from the last snapshot."));
    } else if (test.signal == SIGSTOP) {
      EXPECT_THAT(report.message,
                  ::testing::AnyOf(HasSubstr("kTimeout: "), HasSubstr("kAborted: ")));
      EXPECT_THAT(report.message, HasSubstr("waiting for rank 1 ("));
    } else {
      EXPECT_THAT(report.message, HasSubstr("kPeerLost: "));
    }
    if (test.signal == 0) continue;
    const Duration limit = test.signal == SIGKILL ? kLimit : kStopTimeout + kLimit;
    const Duration waited = report.raised - testing::read_moment(moment_file);
    EXPECT_LT(waited.count(), limit.count()) << "ns, rank " << rank;
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

std::vector<MappedFailureCase> mapped_cases() {
  std::vector<MappedFailureCase> cases;
  for (const Place place : {Place::kInItsWrite, Place::kBeforeTheUpdate, Place::kAfterTheUpdate}) {
    cases.push_back({2, place, SIGKILL});
    cases.push_back({3, place, SIGKILL});
  }
  // The other phases: fsdp_mapped_failure_test.cpp.
  cases.push_back({3, Place::kInItsWrite, SIGSTOP});
  cases.push_back({3, Place::kInItsWrite, 0});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, MappedFailureTest, ::testing::ValuesIn(mapped_cases()),
                         mapped_name_of);

// Proportional set size of the mappings that overlap [begin, begin + num_bytes), in bytes.
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

// All ranks read all parameters, and the pages are there once.
TEST(MappedMemoryTest, AHostHoldsTheParametersOnce) {
  constexpr int64_t kNumel = int64_t{4} << 20;  // 16 MiB
  constexpr int kWorldSize = 4;
  const auto result = testing::run_job(
      {.world_size = kWorldSize}, [](RankContext& context, const Membership& membership) {
        at::set_num_threads(1);
        const ProcessGroup group(testing::connect(context, membership, {}));
        Tensor weight = torch::ones({kNumel}).requires_grad_(true);
        FlatParameters flat({{"weight", weight}}, group, {.form = ShardForm::kMapped});
        flat.unshard_async();
        flat.wait_unsharded();
        require(weight.detach().sum().item<float>() == kNumel, "it reads all of them");
        group.barrier();
        const auto bytes = static_cast<size_t>(kNumel) * sizeof(float);
        // Each page is mapped by every rank once, and by its owner once more.
        const int64_t own = proportional_size_of(weight.const_data_ptr(), bytes);
        require(own > 0, "it is mapped");
        require(own <= static_cast<int64_t>(bytes) / kWorldSize,
                format("{} bytes of one rank, of {} in all", own, bytes));
        // With what the group itself uses.
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

// The fused kernels, of which each takes the addresses of whole tensors.
TEST(MappedMemoryTest, TheFusedOptimizersWriteInTheirUpdateOnly) {
  const auto result =
      testing::run_job({.world_size = 2}, [](RankContext& context, const Membership& membership) {
        at::set_num_threads(1);
        const ProcessGroup group(testing::connect(context, membership, {}));
        const Tensor weight = torch::ones({3000}).requires_grad_(true);
        FlatParameters flat({{"weight", weight}}, group, {.form = ShardForm::kMapped});
        const std::vector<Tensor> leaves = {flat.values(0)};
        flat.values(0).mutable_grad() = torch::ones_like(flat.values(0));
        AdamW adamw(leaves);
        SGD sgd(leaves, 0.5);
        for (const std::string& failure : {testing::failure_of([&] { adamw.step(); }),
                                           testing::failure_of([&] { sgd.step(); })}) {
          require(failure.find("written by Cadre's own step only") != std::string::npos, failure);
        }
        ShardedOptimizer<SGD> sharded(flat.fence(), leaves, 0.5);
        sharded.step();
        flat.unshard_async();
        flat.wait_unsharded();
        require(torch::equal(weight, torch::full({3000}, 0.5)), "one step of all owners");
        flat.reshard();
        group.close();
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// One rank that has too few addresses for the mapping: then all gather.
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
        FlatParametersOptions options{.form = ShardForm::kMapped};
        options.fence = training.units[0]->fence();
        FlatParameters flat({{"weight", weight}}, group, options);
        require(::setrlimit(RLIMIT_AS, &before) == 0, "setrlimit");
        require(!flat.is_mapped(), "gathered on all ranks");
        flat.unshard_async();
        flat.wait_unsharded();
        require(weight.detach().sum().item<float>() == static_cast<float>(weight.numel()),
                "its values");
        flat.reshard();
        training.train(2);  // the others are still mapped
        group.close();
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
