// Tests ShardedGradients without a reducer, with gradients that the tests set, on groups and on
// meshes of two axes.
#include "cadre/parallel/buckets/sharded_gradients.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using testing::FakeGroup;
using testing::GroupCall;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;

// A model of several units. Parameters with "frozen" in their name are frozen.
struct Model {
  std::vector<std::shared_ptr<shard::FlatParameters>> units;
  std::vector<NamedTensor> trained;
};

struct UnitOf {
  std::vector<std::pair<std::string, int64_t>> numels;
};

Model make_model(const std::vector<UnitOf>& units, const wrap::LocatedGroup& group,
                 const shard::FlatParametersOptions& options = {}) {
  Model model;
  for (const UnitOf& unit : units) {
    std::vector<NamedTensor> members;
    for (const auto& [name, numel] : unit.numels) {
      members.push_back({name, torch::arange(numel, torch::kFloat)});
      members.back().tensor.requires_grad_(name.find("frozen") == std::string::npos);
    }
    model.units.push_back(std::make_shared<shard::FlatParameters>(members, group, options));
    for (const NamedTensor& member : model.units.back()->parameters()) {
      if (member.tensor.requires_grad()) model.trained.push_back(member);
    }
  }
  return model;
}

const std::vector<UnitOf> kUnits = {
    {{{"a", 15}, {"frozen.b", 4}, {"c", 40}}}, {{{"frozen.d", 9}}}, {{{"e", 3}, {"f", 21}}}};

// Returns a gradient of the parameter whose elements all differ, also between ranks.
Tensor gradient_of(const NamedTensor& parameter, int rank, at::ScalarType dtype = torch::kFloat) {
  const double base = 100.0 * parameter.name[0] + 7.0 * rank;
  return (torch::arange(parameter.tensor.numel(), torch::kDouble) * (rank + 1) + base).to(dtype);
}

void set_gradients(const Model& model, int rank, at::ScalarType dtype = torch::kFloat) {
  for (const NamedTensor& parameter : model.trained) {
    Tensor tensor = parameter.tensor;
    tensor.mutable_grad() = gradient_of(parameter, rank, dtype);
  }
}

// Runs a pass in which this rank contributes a gradient for every parameter for which is_used(i) is
// true.
void run_pass(
    ShardedGradients& storage, const GradientStorage::Combination& combination,
    const std::function<bool(size_t)>& is_used = [](size_t) { return true; }) {
  storage.begin_pass(combination);
  for (size_t i = 0; i < storage.parameters().size(); ++i) {
    if (is_used(i)) {
      storage.place(i);
    } else {
      storage.place_unused(i);
    }
  }
  while (storage.num_launched() < storage.num_early_buckets()) storage.launch_next();
  storage.trailer().fill_(1);
  storage.finish_early();
  storage.reduce_last();
}

// Requires that the gradient of each trained shard equals this rank's elements of
// expected(parameter), bit for bit.
void require_shards(const Model& model, int shard_rank,
                    const std::function<Tensor(const NamedTensor&)>& expected) {
  for (const auto& unit : model.units) {
    for (size_t i = 0; i < unit->parameters().size(); ++i) {
      const NamedTensor& parameter = unit->parameters()[i];
      const Tensor& gradient = unit->values(i).grad();
      if (!parameter.tensor.requires_grad()) {
        require(!gradient.defined(), parameter.name + " is frozen");
        continue;
      }
      require(!parameter.tensor.grad().defined(), parameter.name + " keeps its full gradient");
      require(gradient.defined(), parameter.name + " has no gradient");
      require(gradient.scalar_type() == unit->shard().scalar_type(), "the dtype of the shard");
      const FlatRange range = unit->layout().range(i, shard_rank);
      const Tensor part = expected(parameter).slice(0, range.begin, range.end);
      require(torch::equal(gradient, part.to(gradient.scalar_type())),
              format("{}: expected {}, got {}", parameter.name,
                     range.size() == 0 ? 0 : part[0].item<double>(),
                     range.size() == 0 ? 0 : gradient[0].item<double>()));
    }
  }
}

// Returns the mean of gradient_of() over all ranks. With these values no sum is rounded.
Tensor mean_over(const NamedTensor& parameter, int world_size) {
  Tensor sum = torch::zeros({parameter.tensor.numel()}, torch::kDouble);
  for (int rank = 0; rank < world_size; ++rank) {
    sum += gradient_of(parameter, rank, torch::kDouble);
  }
  return sum / world_size;
}

TEST(ShardedGradients, EachRankGetsItsPartOfTheMean) {
  for (const int world_size : {1, 2, 4, 8}) {
    const auto result = run_groups(world_size, [](const ProcessGroup& world) {
      const Model model = make_model(kUnits, world);
      std::vector<size_t> taken;
      ShardedGradients storage(
          model.trained, model.units, {.all = world, .shard = world},
          {.trailer_numel = 3, .on_unit_taken = [&](size_t unit) { taken.push_back(unit); }});
      require(storage.num_buckets() == 2, "the frozen unit takes no part");
      require(storage.layout().to_string() == "float32:0,1;float32:2,3", "the layout");
      for (int pass = 1; pass <= 3; ++pass) {
        set_gradients(model, world.rank());
        run_pass(storage, {});
        require(torch::equal(storage.trailer(), torch::ones({3})), "the trailer is averaged");
        require_shards(model, world.rank(), [&](const NamedTensor& parameter) {
          return pass * mean_over(parameter, world.world_size());
        });
      }
      require(taken == std::vector<size_t>{0, 2, 0, 2, 0, 2}, "units are taken, in order");
    });
    EXPECT_TRUE(result.ok()) << world_size << " ranks: " << result.failures();
  }
}

TEST(ShardedGradients, WeightsAreAppliedBeforeTheSum) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const Model model = make_model(kUnits, world);
    ShardedGradients storage(model.trained, model.units, {.all = world, .shard = world},
                             {.trailer_numel = 1});
    for (const NamedTensor& parameter : model.trained) {
      Tensor tensor = parameter.tensor;
      tensor.mutable_grad() = torch::full_like(tensor, world.rank() == 0 ? NAN : 8.0);
    }
    // Rank 0 has no samples: its weight is 0, and its gradient, a mean over no samples, is NaN.
    const std::vector<double> weights = {0, 0.25, 0.25, 0.5};
    run_pass(storage, {.factor = weights[world.rank()], .op = ReduceOp::kSum});
    require_shards(model, world.rank(), [](const NamedTensor& parameter) {
      return torch::full({parameter.tensor.numel()}, 8.0);
    });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The ranks form a mesh of 2 x 2 or 2 x 4. The gradient must be the mean over both axes. It must be
// correct, too, if gradients accumulate over two passes, and after an abandoned pass.
TEST(ShardedGradients, ReplicasOfTheShardsAreAveragedToo) {
  for (const int num_shards : {2, 4}) {
    const auto result = run_groups(2 * num_shards, [num_shards](const ProcessGroup& world) {
      const DeviceMesh mesh(world, {{"replicate", 2}, {"shard", num_shards}});
      const auto shard = mesh.group("shard");
      const auto replicate = mesh.group("replicate");
      const Model model = make_model(kUnits, shard);
      ShardedGradients storage(model.trained, model.units,
                               {.all = world, .shard = shard, .replicate = replicate},
                               {.trailer_numel = 1});
      const auto expect_passes = [&](int num_passes) {
        for (int pass = 1; pass <= num_passes; ++pass) {
          set_gradients(model, world.rank());
          run_pass(storage, {});
          require_shards(model, mesh.coordinate("shard"), [&](const NamedTensor& parameter) {
            return pass * mean_over(parameter, world.world_size());
          });
        }
        storage.zero_grad(/*set_to_none=*/true);
      };
      expect_passes(2);
      // Rank 0 abandons a pass halfway. The other ranks must be able to complete it, and the
      // gradients of the pass must be dropped.
      set_gradients(model, world.rank());
      if (world.rank() == 0) {
        storage.begin_pass({});
        storage.place(0);
        storage.place(1);
        storage.launch_next();
        storage.abandon();
      } else {
        run_pass(storage, {});
      }
      for (const NamedTensor& parameter : model.trained) {
        require(!parameter.tensor.grad().defined(), "left of an abandoned pass");
      }
      storage.zero_grad(/*set_to_none=*/true);
      storage.settle_abandoned();
      expect_passes(2);
      mesh.close();
    });
    EXPECT_TRUE(result.ok()) << num_shards << " shards: " << result.failures();
  }
}

// The gradients are 256, 1, 1 and 1 in bfloat16, and are reduced in float32: the mean must be
// 64.75. In bfloat16, with 8 significant bits, 256 + 1 would be 256.
TEST(ShardedGradients, LowPrecisionGradientsAreSummedInFullPrecision) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const Model model = make_model(kUnits, world, {.compute_dtype = torch::kBFloat16});
    ShardedGradients storage(model.trained, model.units, {.all = world, .shard = world},
                             {.reduce_dtype = torch::kFloat, .trailer_numel = 1});
    for (int pass = 1; pass <= 2; ++pass) {
      for (const NamedTensor& parameter : model.trained) {
        Tensor tensor = parameter.tensor;
        const double value = world.rank() == 0 ? 256 : 1;
        tensor.mutable_grad() = torch::full({parameter.tensor.numel()}, value, torch::kBFloat16);
      }
      run_pass(storage, {});
      require_shards(model, world.rank(), [pass](const NamedTensor& parameter) {
        return torch::full({parameter.tensor.numel()}, pass * 64.75);
      });
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardedGradients, TheReductionMayHaveThePrecisionOfTheGradients) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const Model model = make_model(kUnits, world, {.compute_dtype = torch::kBFloat16});
    ShardedGradients storage(model.trained, model.units, {.all = world, .shard = world},
                             {.trailer_numel = 1});
    for (const NamedTensor& parameter : model.trained) {
      Tensor tensor = parameter.tensor;
      tensor.mutable_grad() =
          torch::full({parameter.tensor.numel()}, 1 + 2.0 * world.rank(), torch::kBFloat16);
    }
    run_pass(storage, {});
    require_shards(model, world.rank(), [](const NamedTensor& parameter) {
      return torch::full({parameter.tensor.numel()}, 2.0);
    });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardedGradients, AnUnusedParameterContributesZerosAndIsSettledLater) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const Model model = make_model({{{{"a", 40}, {"b", 40}}}}, world);
    ShardedGradients storage(model.trained, model.units, {.all = world, .shard = world},
                             {.trailer_numel = 1});
    for (const bool has_gradient : {false, true}) {
      const double before = has_gradient ? 5 : 0;
      // Both ranks use parameter "a", and only rank 0 uses "b".
      set_gradients(model, world.rank());
      if (world.rank() == 1) {
        Tensor tensor = model.trained[1].tensor;
        tensor.mutable_grad().reset();
      }
      for (size_t i = 0; i < 2; ++i) {
        Tensor values = model.units[0]->values(i);
        values.mutable_grad() = has_gradient ? torch::full_like(values, before) : Tensor();
      }
      run_pass(storage, {}, [&](size_t i) { return i == 0 || world.rank() == 0; });
      if (world.rank() == 1) {
        const Tensor& gradient = model.units[0]->values(1).grad();
        require(gradient.defined() == has_gradient, "not before it is settled");
        storage.settle_unused(1, {.used_by_some = true});
      }
      require_shards(model, world.rank(), [&](const NamedTensor& parameter) {
        const Tensor sum = parameter.name == "a" ? mean_over(parameter, 2)
                                                 : gradient_of(parameter, 0, torch::kDouble) / 2;
        return sum + before;
      });
    }
    run_pass(storage, {}, [](size_t) { return false; });
    for (size_t i = 0; i < 2; ++i) {
      const Tensor before = model.units[0]->values(i).grad().clone();
      storage.settle_unused(i, {.used_by_some = false});
      require(torch::equal(before, model.units[0]->values(i).grad()), "used by none");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardedGradients, BucketsMoveIntoTheOrderOfReadiness) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const FakeGroup fake(world);
    const auto replicas = fake.group();
    const Model model =
        make_model({{{{"a", 40}}}, {{{"b", 80}, {"c", 1}}}, {{{"d", 160}}}}, replicas);
    ShardedGradients storage(model.trained, model.units, {.all = replicas, .shard = replicas},
                             {.trailer_numel = 1});
    require(!storage.is_learned(), "not yet");
    storage.learn(std::vector<int64_t>{2, 3, 1, 0});
    require(storage.layout().to_string() == "float32:3;float32:1,2;float32:0", "the order");
    require(storage.bucket_of(0) == 2 && storage.bucket_of(2) == 1, "by parameter");
    fake.clear_log();
    set_gradients(model, world.rank());
    run_pass(storage, {});
    const std::vector<std::string> log = fake.log();
    require(log == std::vector<std::string>{"reduce_scatter(avg, float32 x 96)",
                                            "reduce_scatter(avg, float32 x 64)",
                                            "reduce_scatter(avg, float32 x 32)",
                                            "all_reduce(avg, float32 x 1)"},
            "reduced in this order: " + log.at(0) + ", " + log.at(1));
    require_shards(model, world.rank(),
                   [](const NamedTensor& parameter) { return mean_over(parameter, 2); });

    ShardedGradients resumed(model.trained, model.units, {.all = replicas, .shard = replicas},
                             {.layout = storage.layout(), .trailer_numel = 1});
    require(resumed.layout() == storage.layout() && resumed.is_learned(), "handed to a new run");
    const auto other = BucketLayout::parse("float32:3,0;float32:1,2");
    EXPECT_THAT(testing::failure_of([&] {
                  ShardedGradients(model.trained, model.units, {.all = replicas, .shard = replicas},
                                   {.layout = other, .wrapper = "FullyShardedDataParallel"});
                }),
                HasSubstr("FullyShardedDataParallel, rank "));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// num_late_units is 1: the bucket of unit "c" must stay last, although its gradient becomes ready
// first.
TEST(ShardedGradients, BucketsOfLateUnitsStayLast) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const Model model = make_model({{{{"a", 4}}}, {{{"b", 8}}}, {{{"c", 1}}}}, world);
    ShardedGradients storage(model.trained, model.units, {.all = world, .shard = world},
                             {.trailer_numel = 1, .num_late_units = 1});
    require(storage.num_eager_buckets() == 2, "one is late");
    storage.learn(std::vector<int64_t>{2, 1, 0});
    require(storage.layout().to_string() == "float32:1;float32:0;float32:2", "the order");
    require(storage.num_eager_buckets() == 2, "one is late");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// All buckets share two buffers. Reductions are delayed, so the third launch must wait for the end
// of the first reduction before it fills the buffer.
TEST(ShardedGradients, ABufferIsNotFilledBeforeItsReductionHasEnded) {
  const auto result = run_groups(2, [](const ProcessGroup& world) {
    const FakeGroup fake(world);
    const auto replicas = fake.group();
    const Model model = make_model(
        {{{{"a", 40}}}, {{{"b", 40}}}, {{{"c", 40}}}, {{{"d", 40}}}, {{{"e", 40}}}}, replicas);
    fake.clear_log();
    ShardedGradients storage(model.trained, model.units, {.all = replicas, .shard = replicas},
                             {.trailer_numel = 1});
    require(fake.num_allocated() == 3, "two buffers and the trailer");
    fake.on_call = [&fake](GroupCall& call) {
      if (call.kind == OpKind::kReduceScatter) {
        fake.delay(call);
      } else {
        call.pass_on();
      }
    };
    set_gradients(model, world.rank());
    run_pass(storage, {});
    require_shards(model, world.rank(),
                   [](const NamedTensor& parameter) { return mean_over(parameter, 2); });
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A reduce_scatter fails in the shard group of this rank, but not in the shard groups of its
// replicas. This rank must nevertheless start all all_reduces over replicas, because the other
// ranks wait for them.
TEST(ShardedGradients, AFailedScatterLeavesOutNoReductionOverReplicas) {
  std::vector<std::string> expected;
  for (const int failing : {0, 1, 2, 3}) {
    const FakeGroup shard(std::make_shared<testing::PeersFormula>(2));
    const FakeGroup replicate(std::make_shared<testing::PeersFormula>(2));
    const FakeGroup all(std::make_shared<testing::PeersFormula>(4));
    const auto shards = shard.group();
    const Model model = make_model({{{{"a", 40}}}, {{{"b", 80}}}, {{{"c", 300}}}}, shards);
    ShardedGradients storage(model.trained, model.units,
                             {.all = all.group(), .shard = shards, .replicate = replicate.group()},
                             {.trailer_numel = 1});
    shard.on_call = [failing, number = 0](GroupCall& call) mutable {
      call.pass_on();
      if (call.kind == OpKind::kReduceScatter && ++number == failing) {
        throw Error(ErrorCode::kPeerLost, "rank 1 has died");
      }
    };
    set_gradients(model, 0);
    replicate.clear_log();
    if (failing == 0) {
      run_pass(storage, {});
    } else {
      EXPECT_THAT(testing::failure_of([&] { run_pass(storage, {}); }),
                  HasSubstr("rank 1 has died"));
      storage.abandon();
      static_cast<void>(testing::failure_of([&] { storage.settle_abandoned(); }));
    }
    replicate.group().barrier();  // waits for all operations that were started
    std::vector<std::string> log = replicate.log();
    log.pop_back();
    if (failing == 0) expected = log;
    ASSERT_EQ(expected.size(), 3);
    EXPECT_EQ(log, expected) << "scatter " << failing << " fails";
    shard.begin_threads();
    all.begin_threads();
  }
}

}  // namespace
}  // namespace cadre
