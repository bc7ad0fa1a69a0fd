// Tests that training a module that is divided among 1 to 4 ranks equals training it in one
// process: the same losses and gradients in the first step, and the same parameters after 20 steps,
// when the ranks' parts are put together, within the bounds of wrap_bounds.h. Ranks are threads. In
// one process the loss is libtorch's cross_entropy. The bounds hold for the same reason as for data
// parallelism: ranks add the same terms in another order, here the products of a sum over features,
// and each layer propagates a difference of a few roundings. CADRE_CASES_SEED selects the subset of
// the cases that CTest runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/joined_training.h"
#include "cadre/testing/torch/tp_models.h"
#include "cadre/testing/torch/wrap_bounds.h"

namespace cadre {
namespace {

using testing::Case;
using testing::compare_with_losses;
using testing::Comparison;
using testing::DividedDims;
using testing::DividedModel;
using testing::joined;
using testing::kSteps;
using testing::make_divided_model;
using testing::run_groups;
using testing::tolerance_of;
using testing::Training;
using testing::worse_of;
using torch::Tensor;

std::vector<Case> tensor_parallel_cases() {
  std::vector<Case> cases;
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    for (const char* model :
         {"mlp", "gpt_tied", "gpt_untied", "gpt_tied_sequence", "gpt_untied_sequence"}) {
      for (const char* optimizer : {"sgd", "adamw"}) cases.push_back({model, optimizer, 4, dtype});
    }
  }
  return cases;
}

Training train_model(const Case& test_case, DividedModel& model,
                     const std::vector<Tensor>& batches) {
  return testing::train(test_case, model, batches, [&](const Tensor& batch) {
    ++model.stream->step;
    return model.loss(model.forward(batch), batch);
  });
}

Training train_divided(const Case& test_case, uint64_t seed, int num_ranks,
                       const std::vector<Tensor>& batches) {
  std::vector<std::shared_ptr<DividedModel>> models;
  for (int rank = 0; rank < num_ranks; ++rank) {
    // All ranks start with the weights of rank 0; those of the other ranks are overwritten.
    models.push_back(make_divided_model(test_case, seed + static_cast<uint64_t>(rank)));
  }
  std::vector<Training> trained(models.size());
  std::vector<DividedDims> dims(models.size());
  const auto result = run_groups(num_ranks, [&](const ProcessGroup& group, std::string&) {
    const auto rank = static_cast<size_t>(group.rank());
    // The rank's model must be destroyed before the os::System of its group.
    const auto model = std::move(models[rank]);
    const DeviceMesh mesh(group, {{"tp", num_ranks}});
    for (const ParameterShard& record : parallelize_module(*model, mesh, model->plan())) {
      const Shard* const shard = record.placements[0].shard();
      dims[rank].push_back(shard == nullptr ? std::nullopt : std::optional(shard->dim));
    }
    model->group = mesh.group("tp");
    trained[rank] = train_model(test_case, *model, batches);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  if (!result.ok()) return {};
  return joined(dims[0], trained);
}

class TensorParallelEquality : public ::testing::TestWithParam<Case> {};

TEST_P(TensorParallelEquality, EqualsOneProcessOnEveryNumberOfRanks) {
  constexpr uint64_t kSeed = 1;
  const auto plain = make_divided_model(GetParam(), kSeed);
  torch::manual_seed(kSeed + 98);
  std::vector<Tensor> batches;
  for (int step = 0; step < kSteps; ++step) batches.push_back(plain->make_batch(GetParam().batch));
  const Training alone = train_model(GetParam(), *plain, batches);
  // The gradients of later steps are computed from parameters that already differ within their
  // bounds. In float32 these bounds are much wider than the rounding errors of a gradient, so the
  // bound for gradients is multiplied by 4.
  const double later_gradients = GetParam().dtype == torch::kFloat ? 4 : 1;
  Comparison worst;
  for (const int num_ranks : {1, 2, 3, 4}) {
    const Training trained = train_divided(GetParam(), kSeed, num_ranks, batches);
    if (trained.gradients.size() != alone.gradients.size()) {
      ADD_FAILURE() << num_ranks << " ranks made " << trained.gradients.size() << " steps";
      continue;
    }
    const Comparison comparison = compare_with_losses(GetParam(), trained, alone);
    EXPECT_LE(comparison.first_gradients, 1) << num_ranks << " ranks";
    EXPECT_LE(comparison.gradients, later_gradients) << num_ranks << " ranks";
    EXPECT_LE(comparison.parameters, 1) << num_ranks << " ranks";
    EXPECT_LE(comparison.losses, 1) << num_ranks << " ranks";
    worst = worse_of(worst, comparison);
  }
  const double tolerance = tolerance_of(GetParam());
  std::cout << "worst: first gradients " << worst.first_gradients * tolerance << ", of any step "
            << worst.gradients * tolerance << " of the largest; parameters " << worst.parameters
            << " of their bound, " << worst.relative << " of the largest; losses " << worst.losses
            << " of their bound\n";
}

INSTANTIATE_TEST_SUITE_P(Cases, TensorParallelEquality,
                         ::testing::ValuesIn(testing::share_of(tensor_parallel_cases())),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre
