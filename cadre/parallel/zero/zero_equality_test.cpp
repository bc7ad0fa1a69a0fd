// Training with a divided optimizer on 1 to 8 ranks, as threads, equals training in one process
// within the bounds of wrap_test_bounds.h, and has the bits of the same optimizer undivided on the
// same ranks. The check itself is proved: without a gather, and with values that arrive in another
// place, it fails. Gradients that were not reduced are an error of the optimizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/shard/data_strategy.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/wrap_test_bounds.h"
#include "cadre/testing/torch/zero_test_support.h"

namespace cadre {
namespace {

using testing::adamw_options;
using testing::bits_of;
using testing::Case;
using testing::compare;
using testing::Comparison;
using testing::copies_of;
using testing::FakeGroup;
using testing::GroupCall;
using testing::Model;
using testing::reduce_gradients;
using testing::sgd_options;
using testing::ShardedGradientsModel;
using testing::share_of;
using testing::Training;
using testing::worse_of;
using torch::Tensor;

// What the ranks do wrong in stage 1.
enum class Fault { kNone, kNoGather, kWrongRange };

// Small buffers, so that there are several, and a rank's shard begins within a parameter.
constexpr ZeroOptions kSmallBuckets{.bucket_cap_bytes = 1500};

// More elements than the optimizer gathers to compare gradients: one for each parameter.
constexpr int64_t kMinOfBuffer = 16;

void inject(const FakeGroup& group, Fault fault) {
  if (fault == Fault::kNone) return;
  group.on_call = [fault](GroupCall& call) {
    const bool is_of_buffer = call.input.numel() >= kMinOfBuffer;
    if (call.kind != OpKind::kAllGather || !is_of_buffer) return call.pass_on();
    if (fault == Fault::kNoGather) return;
    // This rank's neighbours in the buffer change places.
    call.pass_on();
    const torch::NoGradGuard no_grad;
    call.output.copy_(call.output.clone().roll(1));
  };
}

// One rank's training. `step`: zero_grad and step.
Training train_steps(const Case& test_case, Model& model, const std::vector<Tensor>& batches,
                     const ProcessGroup& group, torch::optim::Optimizer& optimizer,
                     ShardedGradientsModel* sharded) {
  Training training;
  for (const Tensor& batch : batches) {
    optimizer.zero_grad();
    if (sharded != nullptr) sharded->before_forward();
    const auto share = share_of(test_case.batch, group.rank(), group.world_size());
    const Tensor mine = batch.narrow(0, share.begin, share.size());
    model.loss(model.forward(mine), mine).backward();
    const double weight = static_cast<double>(share.size()) / static_cast<double>(test_case.batch);
    if (sharded != nullptr) {
      sharded->reduce(weight);
    } else {
      reduce_gradients(model, group, weight);
      training.gradients.push_back(testing::gradients_of(model));
    }
    optimizer.step();
  }
  if (sharded != nullptr) sharded->before_forward();
  training.parameters = copies_of(model.parameters());
  return training;
}

template <typename O, typename Options>
Training train_with(DataStrategy strategy, const Case& test_case,
                    const std::shared_ptr<Model>& model, const std::vector<Tensor>& batches,
                    const ProcessGroup& group, const Options& options, Fault fault) {
  if (strategy == DataStrategy::kDdp) {
    wrap::broadcast_tensors(distinct_parameters(*model), 0, group);
    O optimizer(model->parameters(), options);
    return train_steps(test_case, *model, batches, group, optimizer, nullptr);
  }
  if (strategy == DataStrategy::kZero1) {
    const FakeGroup fake(group);
    ZeroRedundancyOptimizer<O> optimizer(model->named_parameters(), fake.group(), options,
                                         kSmallBuckets);
    inject(fake, fault);
    return train_steps(test_case, *model, batches, group, optimizer, nullptr);
  }
  ShardedGradientsModel sharded(model, group);
  ZeroRedundancyOptimizer<O> optimizer(sharded, options);
  return train_steps(test_case, *model, batches, group, optimizer, &sharded);
}

struct Kind {
  DataStrategy strategy;
  bool is_fused = true;
  Fault fault = Fault::kNone;
};

std::vector<Training> train_on_ranks(const Kind& kind, const Case& test_case,
                                     const std::vector<Tensor>& batches, int world_size) {
  return testing::train_on_ranks(
      test_case, /*seed=*/1, world_size,
      [&](const ProcessGroup& group, const std::shared_ptr<Model>& model) {
        const auto run = [&]<typename O>(std::type_identity<O>, const auto& options) {
          return train_with<O>(kind.strategy, test_case, model, batches, group, options,
                               kind.fault);
        };
        if (test_case.optimizer == "sgd") {
          return kind.is_fused ? run(std::type_identity<SGD>(), sgd_options())
                               : run(std::type_identity<torch::optim::SGD>(), sgd_options());
        }
        return kind.is_fused ? run(std::type_identity<AdamW>(), adamw_options())
                             : run(std::type_identity<torch::optim::AdamW>(), adamw_options());
      });
}

Comparison worst_of(const Case& test_case, const std::vector<Training>& trained,
                    const Training& alone) {
  Comparison worst;
  for (const Training& rank : trained) {
    Training checked = rank;
    // Stage 2 has no whole gradients; the parameters tell.
    if (checked.gradients.empty()) checked.gradients = alone.gradients;
    worst = worse_of(worst, compare(test_case, checked, alone));
  }
  return worst;
}

class ZeroEquality : public ::testing::TestWithParam<Case> {};

TEST_P(ZeroEquality, EqualsOneProcessAndThePlainOptimizerOnEveryNumberOfRanks) {
  const auto batches = testing::make_batches(GetParam(), 1);
  const Training alone = testing::train_alone(GetParam(), batches, 1);
  for (const int world_size : {1, 2, 3, 4, 8}) {
    const std::string where = std::to_string(world_size) + " ranks";
    const auto plain = train_on_ranks({DataStrategy::kDdp}, GetParam(), batches, world_size);
    for (const DataStrategy strategy : {DataStrategy::kZero1, DataStrategy::kZero2}) {
      const auto trained = train_on_ranks({strategy}, GetParam(), batches, world_size);
      EXPECT_LE(worst_of(GetParam(), trained, alone).parameters, 1) << where;
      for (const Training& rank : trained) {
        EXPECT_EQ(bits_of(rank.parameters), bits_of(plain[0].parameters)) << where;
      }
    }
    const auto of_libtorch =
        train_on_ranks({DataStrategy::kZero1, /*is_fused=*/false}, GetParam(), batches, world_size);
    EXPECT_LE(worst_of(GetParam(), of_libtorch, alone).parameters, 1) << where;
    for (const Training& rank : of_libtorch) {
      EXPECT_EQ(bits_of(rank.parameters), bits_of(of_libtorch[0].parameters)) << where;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ZeroEquality,
                         ::testing::ValuesIn(testing::share_of(testing::all_cases())),
                         ::testing::PrintToStringParamName());

class ZeroEqualityNotices : public ::testing::TestWithParam<Fault> {};

TEST_P(ZeroEqualityNotices, TheFault) {
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    const Case test_case{"mlp", "sgd", 48, dtype};
    const auto batches = testing::make_batches(test_case, 1);
    const Training alone = testing::train_alone(test_case, batches, 1);
    const auto trained =
        train_on_ranks({DataStrategy::kZero1, true, GetParam()}, test_case, batches, 2);
    EXPECT_GT(worst_of(test_case, trained, alone).parameters, dtype == torch::kDouble ? 1e3 : 100);
  }
}

INSTANTIATE_TEST_SUITE_P(Faults, ZeroEqualityNotices,
                         ::testing::Values(Fault::kNoGather, Fault::kWrongRange));

}  // namespace
}  // namespace cadre
