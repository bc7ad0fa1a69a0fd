// Tests that training a GPT whose sequences are divided among ranks equals training it in one
// process, also if the ranks divide its layers in addition. Compares the losses, gradients and
// parameters of 20 steps within the bounds of wrap_bounds.h. Ranks are threads. In one process the
// attention is libtorch's, or is computed by its formula if it has dropout, and the loss is
// libtorch's cross_entropy. The bounds hold for the same reason as for tensor parallelism: ranks
// add the same terms in another order. CADRE_CASES_SEED selects the subset of the cases that CTest
// runs.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/joined_training.h"
#include "cadre/testing/torch/tp_models.h"
#include "cadre/testing/torch/wrap_bounds.h"

namespace cadre {
namespace {

using testing::bits_of;
using testing::Case;
using testing::Comparison;
using testing::DividedDims;
using testing::DividedGpt;
using testing::DividedModel;
using testing::run_groups;
using testing::Training;
using torch::Tensor;

struct ContextCase {
  Case trained;
  ContextForm form;
  SequenceOrder order;
};
std::ostream& operator<<(std::ostream& out, const ContextCase& context_case) {
  return out << context_case.trained << "_" << to_string(context_case.form) << "_"
             << to_string(context_case.order);
}

std::vector<ContextCase> context_cases() {
  std::vector<ContextCase> cases;
  for (const auto form : {ContextForm::kRing, ContextForm::kAllToAll}) {
    for (const auto order : {SequenceOrder::kContiguous, SequenceOrder::kZigzag}) {
      for (const Case& trained :
           {Case{"gpt_tied", "adamw", 4, torch::kDouble}, Case{"gpt_tied", "sgd", 4, torch::kFloat},
            Case{"gpt_untied_sequence", "sgd", 4, torch::kDouble},
            Case{"gpt_untied_sequence", "adamw", 4, torch::kFloat}}) {
        cases.push_back({trained, form, order});
      }
    }
  }
  return cases;
}

Training train_shared(const Case& test_case, DividedModel& model,
                      const std::vector<Tensor>& batches) {
  return testing::train(
      test_case, model, batches,
      [&](const Tensor& batch) {
        ++model.stream->step;
        return model.loss(model.forward(batch), batch);
      },
      [&] {
        if (model.context) model.context->sum_gradients(testing::parameters_of(model));
      });
}

struct Degrees {
  int context;
  int tensor;
};

Training train_on(const ContextCase& context_case, const Degrees& degrees, uint64_t seed,
                  const std::vector<Tensor>& batches) {
  const int num_ranks = degrees.context * degrees.tensor;
  std::vector<std::shared_ptr<DividedModel>> models;
  for (int rank = 0; rank < num_ranks; ++rank) {
    models.push_back(make_divided_model(context_case.trained, seed));
  }
  std::vector<Training> trained(models.size());
  std::vector<DividedDims> dims(models.size());
  const auto result = run_groups(num_ranks, [&](const ProcessGroup& group, std::string&) {
    const auto rank = static_cast<size_t>(group.rank());
    // The rank's model must be destroyed before the os::System of its group.
    const auto model = std::move(models[rank]);
    const DeviceMesh mesh(group, {{"cp", degrees.context}, {"tp", degrees.tensor}});
    for (const ParameterShard& record : parallelize_module(*model, mesh["tp"], model->plan())) {
      const Shard* const shard = record.placements[0].shard();
      dims[rank].push_back(shard == nullptr ? std::nullopt : std::optional(shard->dim));
    }
    model->group = mesh.group("tp");
    model->context.emplace(mesh.group("cp"),
                           ContextParallelOptions{.num_tokens = DividedGpt::kTokens,
                                                  .form = context_case.form,
                                                  .order = context_case.order});
    set_context_parallel(*model, *model->context);
    trained[rank] = train_shared(context_case.trained, *model, batches);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  if (!result.ok()) return {};
  // Ranks with the same coordinate along "tp" have equal parameters, bit for bit.
  for (int rank = degrees.tensor; rank < num_ranks; ++rank) {
    EXPECT_TRUE(bits_of(trained[rank].parameters) ==
                bits_of(trained[rank % degrees.tensor].parameters))
        << "rank " << rank;
  }
  trained.resize(static_cast<size_t>(degrees.tensor));
  return joined(dims[0], trained);
}

class ContextParallelEquality : public ::testing::TestWithParam<ContextCase> {};

TEST_P(ContextParallelEquality, EqualsOneProcessAlsoWithTensorParallelism) {
  constexpr uint64_t kSeed = 1;
  const Case& trained = GetParam().trained;
  const auto plain = make_divided_model(trained, kSeed);
  torch::manual_seed(kSeed + 98);
  std::vector<Tensor> batches;
  for (int step = 0; step < testing::kSteps; ++step) {
    batches.push_back(plain->make_batch(trained.batch));
  }
  const Training alone = train_shared(trained, *plain, batches);
  // The comment at the same variable in tp_equality_test.cpp explains this factor.
  const double later_gradients = trained.dtype == torch::kFloat ? 4 : 1;
  for (const Degrees degrees :
       {Degrees{1, 1}, Degrees{2, 1}, Degrees{3, 1}, Degrees{4, 1}, Degrees{2, 2}}) {
    const Training shared = train_on(GetParam(), degrees, kSeed, batches);
    const std::string where =
        std::to_string(degrees.context) + " x " + std::to_string(degrees.tensor);
    if (shared.gradients.size() != alone.gradients.size()) {
      ADD_FAILURE() << where << ": " << shared.gradients.size() << " steps";
      continue;
    }
    const Comparison comparison = compare_with_losses(trained, shared, alone);
    EXPECT_LE(comparison.first_gradients, 1) << where;
    EXPECT_LE(comparison.gradients, later_gradients) << where;
    EXPECT_LE(comparison.parameters, 1) << where;
    EXPECT_LE(comparison.losses, 1) << where;
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ContextParallelEquality,
                         ::testing::ValuesIn(testing::share_of(context_cases())),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre
