// Tests that training a model whose experts are divided among ranks equals training it in one
// process with the whole batch, also if further ranks have replicas of the experts. Compares the
// losses, gradients and parameters of 20 steps within the bounds of wrap_bounds.h. Ranks are
// threads. The bounds hold for the same reason as for data parallelism: ranks add the same terms in
// another order. The router selects the same experts as long as the logits of a token differ by
// more than these rounding errors. CADRE_CASES_SEED selects the subset of the cases that CTest
// runs.
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
#include "cadre/testing/torch/ep_models.h"
#include "cadre/testing/torch/joined_training.h"
#include "cadre/testing/torch/wrap_bounds.h"

namespace cadre {
namespace {

using testing::bits_of;
using testing::Case;
using testing::Comparison;
using testing::Degrees;
using testing::ExpertModel;
using testing::make_expert_model;
using testing::run_groups;
using testing::Training;
using torch::Tensor;

std::vector<Case> expert_parallel_cases() {
  std::vector<Case> cases;
  for (const auto dtype : {torch::kDouble, torch::kFloat}) {
    for (const char* model : {"mlp", "gpt"}) {
      for (const char* optimizer : {"sgd", "adamw"}) {
        cases.push_back({model, optimizer, std::string(model) == "mlp" ? 48 : 9, dtype});
      }
    }
  }
  return cases;
}

Training train_model(const Case& test_case, ExpertModel& model,
                     const std::vector<Tensor>& batches) {
  return testing::train(
      test_case, model, batches,
      [&](const Tensor& batch) { return model.loss(model.forward(batch), batch); },
      [&] {
        if (model.experts != nullptr) model.experts->sum_gradients();
      });
}

Training train_on(const Case& test_case, const Degrees& degrees, uint64_t seed,
                  const std::vector<Tensor>& batches) {
  const int num_ranks = degrees.dp * degrees.ep;
  std::vector<std::shared_ptr<ExpertModel>> models;
  for (int rank = 0; rank < num_ranks; ++rank) {
    // All ranks start with the weights of rank 0; those of the other ranks are overwritten.
    models.push_back(make_expert_model(test_case, seed + static_cast<uint64_t>(rank)));
  }
  std::vector<Training> trained(models.size());
  std::vector<testing::DividedDims> divided_dims(models.size());
  const auto result = run_groups(num_ranks, [&](const ProcessGroup& group, std::string&) {
    const auto rank = static_cast<size_t>(group.rank());
    // This rank's model must be destroyed before the os::System of its group.
    const auto model = std::move(models[rank]);
    const DeviceMesh mesh(group, {{"dp", degrees.dp}, {"ep", degrees.ep}});
    const ExpertParallel experts(*model, mesh);
    model->experts = &experts;
    for (const ParameterShard& record : experts.parameter_shards()) {
      const bool is_divided = record.placements[1].shard() != nullptr;
      divided_dims[rank].push_back(is_divided ? std::optional<int64_t>(0) : std::nullopt);
    }
    std::vector<Tensor> own;
    for (const Tensor& batch : batches) {
      const auto share = testing::share_of(batch.size(0), group.rank(), num_ranks);
      own.push_back(batch.narrow(0, share.begin, share.size()));
    }
    trained[rank] = train_model(test_case, *model, own);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  if (!result.ok()) return {};
  // Ranks with the same coordinate along "ep" have the same experts, so all of their parameters are
  // equal, bit for bit.
  for (int rank = degrees.ep; rank < num_ranks; ++rank) {
    EXPECT_EQ(bits_of(trained[rank].parameters), bits_of(trained[rank % degrees.ep].parameters))
        << "rank " << rank;
  }
  trained.resize(static_cast<size_t>(degrees.ep));
  return testing::joined(divided_dims[0], trained);
}

class ExpertParallelEquality : public ::testing::TestWithParam<Case> {};

TEST_P(ExpertParallelEquality, EqualsOneProcessAlsoWithReplicas) {
  constexpr uint64_t kSeed = 1;
  const auto plain = make_expert_model(GetParam(), kSeed);
  torch::manual_seed(kSeed + 98);
  std::vector<Tensor> batches;
  for (int step = 0; step < testing::kSteps; ++step) {
    batches.push_back(plain->make_batch(GetParam().batch));
  }
  const Training alone = train_model(GetParam(), *plain, batches);
  // The gradients of later steps are computed from parameters that already differ within their
  // bounds. In float32 these bounds are much wider than the rounding errors of a gradient, so the
  // bound for gradients is multiplied by 4.
  const double later_gradients = GetParam().dtype == torch::kFloat ? 4 : 1;
  Comparison worst;
  for (const Degrees degrees : {Degrees{1, 1}, Degrees{1, 2}, Degrees{1, 4}, Degrees{2, 2}}) {
    const Training divided = train_on(GetParam(), degrees, kSeed, batches);
    const std::string where =
        "dp " + std::to_string(degrees.dp) + ", ep " + std::to_string(degrees.ep);
    if (divided.gradients.size() != alone.gradients.size()) {
      ADD_FAILURE() << where << ": " << divided.gradients.size() << " steps";
      continue;
    }
    const Comparison comparison = compare_with_losses(GetParam(), divided, alone);
    EXPECT_LE(comparison.first_gradients, 1) << where;
    EXPECT_LE(comparison.gradients, later_gradients) << where;
    EXPECT_LE(comparison.parameters, 1) << where;
    EXPECT_LE(comparison.losses, 1) << where;
    worst = worse_of(worst, comparison);
  }
  std::cout << "worst: first gradients " << worst.first_gradients << ", of any step "
            << worst.gradients << ", parameters " << worst.parameters << ", losses " << worst.losses
            << " of their bounds\n";
}

INSTANTIATE_TEST_SUITE_P(Cases, ExpertParallelEquality,
                         ::testing::ValuesIn(testing::share_of(expert_parallel_cases())),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre
