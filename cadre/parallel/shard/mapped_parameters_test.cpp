// Tests that training with mapped shards gives the same bits as training with gathered shards,
// whichever rank is slow.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/shard_fence.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/shard_training.h"

namespace cadre {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using testing::bits_equal;
using testing::failure_of;
using testing::mapped;
using testing::nap;
using testing::parameter_of;
using testing::require;
using testing::require_in;
using testing::run_groups;
using testing::ShardedTraining;
using testing::ShardedTrainingOptions;
using torch::Tensor;

// Compares the losses and parameters of mapped and gathered shards, trained one after the other on
// the same ranks.
void compare_forms(
    const ProcessGroup& group, const ShardedTrainingOptions& options, int num_steps,
    const std::function<void()>& pause = [] {}) {
  ShardedTraining reference(group, options);
  const std::vector<double> losses = reference.train(num_steps);
  ShardedTrainingOptions other = mapped(options);
  other.pause = pause;
  ShardedTraining training(group, other);
  for (const auto& unit : training.units) require(unit->is_mapped(), "it is mapped");
  require(training.train(num_steps) == losses, "the losses, bit for bit");
  require(bits_equal(training.values(), reference.values()), "the parameters, bit for bit");
  require(losses.front() != losses[losses.size() - 2], "it trains");
}

TEST(MappedParameters, TrainWithTheBitsOfTheGatheringFormOnSkewedRanks) {
  const uint64_t seed = testing::test_seeds(1)[0];
  for (const int world_size : {1, 2, 3, 4}) {
    const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
      std::mt19937_64 random(seed + static_cast<uint64_t>(group.rank()));
      compare_forms(group, {}, 50, [&] {
        if (random() % 8 == 0) nap(group, microseconds(random() % 300));
      });
    });
    EXPECT_TRUE(result.ok()) << world_size << " ranks, seed " << seed << ": " << result.failures();
  }
}

TEST(MappedParameters, TrainInEveryDtype) {
  struct Case {
    torch::ScalarType dtype;
    std::optional<torch::ScalarType> compute;
  };
  for (const Case& test :
       {Case{torch::kDouble, {}}, Case{torch::kBFloat16, {}}, Case{torch::kFloat, torch::kBFloat16},
        Case{torch::kFloat, torch::kHalf}}) {
    const auto result = run_groups(3, [&](const ProcessGroup& group) {
      ShardedTrainingOptions options{.dtype = test.dtype};
      options.flat.compute_dtype = test.compute;
      // The shards of both forms have the same bounds with this alignment. In bf16 the results of
      // torch::optim depend on whether a kernel processes an element in a vector or in the scalar
      // rest.
      options.flat.alignment = SymmetricTensor::kPageBytes;
      compare_forms(group, options, 10);
    });
    EXPECT_TRUE(result.ok()) << torch::toString(test.dtype) << ": " << result.failures();
  }
}

// The widths of the layers give units with fewer elements than there are ranks, with less than a
// page, and with one element more than a page.
TEST(MappedParameters, TrainWhereSomeRanksOwnNothing) {
  for (const std::vector<int64_t>& widths :
       {std::vector<int64_t>{1, 2, 1}, std::vector<int64_t>{31, 32, 33, 3}}) {
    const auto result = run_groups(8, [&](const ProcessGroup& group) {
      ShardedTrainingOptions options;
      options.widths = widths;
      compare_forms(group, options, 5);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// The reference trains the plain parameters on each rank without communication: it computes the
// gradients of the inputs of all ranks and uses their mean.
TEST(MappedParameters, TrainAsOneProcess) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    ShardedTraining training(group, mapped({.dtype = torch::kDouble}));
    std::vector<Tensor> plain;
    for (const Tensor& values : training.values()) plain.push_back(parameter_of(values));
    torch::optim::AdamW optimizer(plain, torch::optim::AdamWOptions(0.05).weight_decay(0.01));
    for (int step = 0; step < 20; ++step) {
      optimizer.zero_grad();
      for (int rank = 0; rank < 3; ++rank) {
        Tensor x = training.input(step, rank);
        for (size_t i = 0; i < plain.size(); i += 2) {
          x = torch::tanh(torch::linear(x, plain[i], plain[i + 1]));
        }
        (x.pow(2).sum() / 3).backward();
      }
      optimizer.step();
    }
    training.train(20);
    const std::vector<Tensor> values = training.values();
    for (size_t i = 0; i < plain.size(); ++i) {
      require(torch::allclose(values[i], plain[i], 1e-9, 1e-11), format("parameter {}", i));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// One slow rank runs a forward after the backward. The other ranks must wait for it before they
// write their shards in the step.
TEST(MappedParameters, AnOwnerWaitsForTheLastReader) {
  for (const int slow : {0, 2}) {
    const auto result = run_groups(3, [&](const ProcessGroup& group) {
      bool is_evaluating = false;
      ShardedTraining reference(group, {});
      const std::vector<double> losses = reference.train(4);
      ShardedTrainingOptions options = mapped();
      options.pause = [&] {
        if (is_evaluating && group.rank() == slow) nap(group, milliseconds(5));
      };
      ShardedTraining training(group, options);
      for (size_t step = 0; step < 4; ++step) {
        require(training.backward(static_cast<int>(step)) == losses[2 * step], "backward");
        is_evaluating = true;
        require(training.evaluate(static_cast<int>(step)) == losses[2 * step + 1],
                "a forward between backward and step");
        is_evaluating = false;
        training.update();
      }
    });
    EXPECT_TRUE(result.ok()) << "rank " << slow << " is slow: " << result.failures();
  }
}

TEST(MappedParameters, AReaderWaitsForTheLastOwner) {
  for (const int slow : {0, 2}) {
    const auto result = run_groups(3, [&](const ProcessGroup& group) {
      ShardedTraining reference(group, {});
      const std::vector<double> losses = reference.train(4);
      ShardedTraining training(group, mapped());
      if (group.rank() == slow) {
        training.optimizer->pause = [&] { nap(group, milliseconds(20)); };
      }
      require(training.train(4) == losses, "the losses, bit for bit");
    });
    EXPECT_TRUE(result.ok()) << "rank " << slow << " is slow: " << result.failures();
  }
}

TEST(MappedParameters, AReaderWaitsForTheFirstValues) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    const Tensor weight = parameter_of(torch::arange(5000, torch::kFloat));
    const testing::FakeGroup fake(group);
    fake.on_call = [&](testing::GroupCall& call) {
      call.pass_on();
      // Rank 1 pauses after the allocation and before it writes its first values to the shared
      // memory. The other ranks must wait for these values.
      if (call.kind == OpKind::kAllocate && group.rank() == 1) nap(group, milliseconds(20));
    };
    shard::FlatParameters flat({{"weight", weight}}, fake.group(), {.form = ShardForm::kMapped});
    flat.unshard_async();
    flat.wait_unsharded();
    require(torch::equal(weight, torch::arange(5000, torch::kFloat)), "the values");
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 1 aborts the group. A use of mapped parameters must then throw on both ranks, as with
// gathered parameters, although no rank waits for another.
TEST(MappedParameters, AreNotThereAfterAFailureOfTheGroup) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    ShardedTraining training(group, mapped());
    training.train(1);
    training.evaluate(1);
    group.barrier();
    if (group.rank() == 1) group.abort("enough");
    if (group.rank() == 0) failure_of([&] { group.barrier(); });
    require_in(failure_of([&] { training.evaluate(1); }), "enough");
    require_in(failure_of([&] { training.weights[0].sum(); }), "are not available");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MappedParameters, OfEveryDtypeFillWholePagesAndNoMore) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
      const Tensor weight = parameter_of(torch::ones({100}, dtype));
      shard::FlatParameters flat({{"weight", weight}}, group, {.form = ShardForm::kMapped});
      require(flat.is_mapped(), "they are mapped");
      const auto bytes = static_cast<size_t>(flat.layout().shard_numel()) * weight.element_size();
      require(bytes == SymmetricTensor::kPageBytes, std::to_string(bytes) + " bytes of a rank");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MappedParameters, LieInPagesOfTheirOwners) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    const Tensor weight = parameter_of(torch::arange(5000, torch::kFloat));
    shard::FlatParameters flat({{"weight", weight}}, group,
                               {.form = ShardForm::kMapped, .alignment = 3});
    require(flat.layout().shard_numel() == 3 * 1024, "whole pages, and a multiple of 3");
    require(!flat.is_unsharded(), "not before they are unsharded");
    flat.unshard_async();
    flat.wait_unsharded();
    require(torch::equal(weight, torch::arange(5000, torch::kFloat)), "the values");
    const void* const begin = weight.const_data_ptr();
    flat.reshard();
    flat.unshard_async();
    flat.wait_unsharded();
    require(weight.const_data_ptr() == begin, "the same memory each time");
    flat.reshard();
    shard::FencedUpdate update(flat.fence());
    {
      const torch::NoGradGuard no_grad;
      flat.values(0).fill_(group.rank() + 1);
    }
    update.finish();
    flat.unshard_async();
    flat.wait_unsharded();
    for (int rank = 0; rank < 3; ++rank) {
      const FlatRange range = flat.layout().range(0, rank);
      const Tensor part = weight.detach().slice(0, range.begin, range.end);
      require(torch::equal(part, torch::full_like(part, rank + 1)), "what its owner wrote");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MappedParameters, OfTwoOptimizersAreWrittenInTurn) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    ShardedTraining training(group, mapped());
    const auto fence = training.units[0]->fence();
    for (int step = 0; step < 20; ++step) {
      training.backward(step);
      training.update();
      if (group.rank() == 1) nap(group, microseconds(200));
      training.update();  // there was no forward between the two updates
    }
    require(fence->num_updates() == 40, "counted");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MappedParameters, AreGatheredWhereRanksShareNoMemory) {
  const auto result =
      run_groups(2,
                 [](const ProcessGroup& group) {
                   ShardedTraining reference(group, {});
                   ShardedTraining training(group, mapped());
                   for (const auto& unit : training.units) {
                     require(!unit->is_mapped(), "gathered");
                     // Shards must be whole pages also here: a replica of them on another host may
                     // be mapped, and all replicas have the same layout.
                     require(unit->layout().shard_numel() % 1024 == 0, "in whole pages");
                   }
                   require(training.train(5) == reference.train(5), "the losses");
                 },
                 {.transport = TransportChoice::kTcp});
  EXPECT_TRUE(result.ok()) << result.failures();
  const shard::FlatParameters flat(
      {{"weight", parameter_of(torch::ones({4}))}},
      testing::FakeGroup(std::make_shared<testing::PeersFormula>(2)).group(),
      {.form = ShardForm::kMapped});
  EXPECT_FALSE(flat.is_mapped());
}

// The option is kMapped, but over TCP the shards are gathered. An access to the parameters during
// an update must throw, as with mapped shards.
TEST(MappedParameters, ThatAreGatheredAreNotThereDuringAnUpdate) {
  const auto result = run_groups(
      2,
      [](const ProcessGroup& group) {
        const Tensor weight = parameter_of(torch::arange(2500, torch::kFloat));
        shard::FlatParameters flat({{"weight", weight}}, group, {.form = ShardForm::kMapped});
        require(!flat.is_mapped(), "gathered");
        flat.unshard_async();
        flat.wait_unsharded();
        require(flat.is_unsharded(), "there");
        shard::FencedUpdate update(flat.fence());
        require(!flat.is_unsharded(), "withdrawn");
        require_in(failure_of([&] { weight.sum(); }), "have changed on the ranks that own them");
        {
          const torch::NoGradGuard no_grad;
          flat.values(0).fill_(group.rank() + 1);
        }
        update.finish();
        flat.unshard_async();
        flat.wait_unsharded();
        for (int rank = 0; rank < 2; ++rank) {
          const FlatRange range = flat.layout().range(0, rank);
          const Tensor part = weight.detach().slice(0, range.begin, range.end);
          require(torch::equal(part, torch::full_like(part, rank + 1)), "what its owner wrote");
        }
      },
      {.transport = TransportChoice::kTcp});
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(MappedParameters, LeaveNothingBehindAlsoWhenTensorsOutliveTheGroup) {
  // This run starts libtorch's own threads before the resources are counted, so that the test does
  // not report them as leaks.
  run_groups(2, [](const ProcessGroup& group) { compare_forms(group, {}, 1); });
  const testing::Resources before = testing::count_resources();
  std::vector<Tensor> kept(2);
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto rank = static_cast<size_t>(group.rank());
    kept[rank] = parameter_of(torch::arange(3000, torch::kFloat));
    shard::FlatParameters flat({{"weight", kept[rank]}}, group, {.form = ShardForm::kMapped});
    flat.unshard_async();
    flat.wait_unsharded();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const Tensor& weight : kept) {
    EXPECT_TRUE(torch::equal(weight, torch::arange(3000, torch::kFloat)));
  }
  EXPECT_GT(testing::count_resources().num_segments, before.num_segments);
  kept.clear();
  EXPECT_EQ(testing::leftovers_since(before), "");
}

}  // namespace
}  // namespace cadre
