// Tests that training on a mesh of several axes, on up to 8 ranks as threads, equals training in
// one process with libtorch's loss and clipping: the losses, norms and gradients of each step and
// the final parameters are within the bounds of wrap_bounds.h. In every step gradients are clipped
// by their norm over all axes, and dropout drops the same elements as in one process. The bounds
// are those for a single axis: ranks only add the same terms in another order. The seed
// CADRE_CASES_SEED chooses which cases CTest runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/axes_layouts.h"
#include "cadre/testing/torch/axes_training.h"

namespace cadre {
namespace {

using testing::AxesMistake;
using testing::AxesRank;
using testing::AxesTraining;
using testing::Case;
using testing::Comparison;
using testing::Layout;
using torch::Tensor;

constexpr uint64_t kEqualitySeed = 3;

struct AxesCase {
  Layout layout;
  Case training;
};

std::ostream& operator<<(std::ostream& out, const AxesCase& given) {
  return out << given.layout.name << "_" << given.training;
}

// Returns three cases for every layout: SGD in float64, AdamW in float64, and one of the two,
// alternately, in float32.
std::vector<AxesCase> axes_cases() {
  std::vector<AxesCase> cases;
  for (const Layout& layout : testing::axes_layouts()) {
    const auto add = [&](const char* optimizer, torch::ScalarType dtype) {
      cases.push_back({layout, {"gpt", optimizer, testing::kAxesRows, dtype}});
    };
    add("sgd", torch::kDouble);
    add("adamw", torch::kDouble);
    add(cases.size() % 4 == 0 ? "sgd" : "adamw", torch::kFloat);
  }
  return cases;
}

AxesTraining train_on_ranks(const AxesCase& given, const std::vector<Tensor>& batches,
                            AxesMistake mistake = AxesMistake::kNone) {
  const Layout& layout = given.layout;
  std::vector<AxesTraining> trained(static_cast<size_t>(layout.num_ranks()));
  const auto whole = testing::make_axes_gpt(layout.kind, given.training.dtype, kEqualitySeed);
  const auto result = testing::run_groups(layout.num_ranks(), [&](const ProcessGroup& world) {
    AxesRank rank(layout, given.training, world, *whole, batches, mistake);
    trained[static_cast<size_t>(world.rank())] = rank.train();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  if (!result.ok()) return {};
  if (mistake != AxesMistake::kNone) return trained[0];
  for (const AxesTraining& of_rank : trained) {
    EXPECT_EQ(testing::bits_of(of_rank.training.parameters),
              testing::bits_of(trained[0].training.parameters));
    EXPECT_EQ(of_rank.norms, trained[0].norms);
  }
  return trained[0];
}

AxesTraining train_alone(const AxesCase& given, const std::vector<Tensor>& batches) {
  at::set_num_threads(1);
  return testing::train_axes_alone(
      given.training,
      *testing::make_axes_gpt(given.layout.kind, given.training.dtype, kEqualitySeed), batches);
}

// Returns the largest relative error of the norm in any step.
double worst_norm(const AxesTraining& trained, const AxesTraining& alone) {
  double worst = 0;
  for (size_t step = 0; step < alone.norms.size(); ++step) {
    worst = std::max(worst, std::abs(trained.norms[step] / alone.norms[step] - 1));
  }
  return worst;
}

class AxesEquality : public ::testing::TestWithParam<AxesCase> {};

TEST_P(AxesEquality, EqualsOneProcess) {
  const std::vector<Tensor> batches = testing::axes_batches(testing::kSteps);
  const AxesTraining alone = train_alone(GetParam(), batches);
  const AxesTraining trained = train_on_ranks(GetParam(), batches);
  ASSERT_EQ(trained.norms.size(), alone.norms.size());
  const Case& training = GetParam().training;
  // tp_equality_test.cpp explains the factor 4.
  const double later_gradients = training.dtype == torch::kFloat ? 4 : 1;
  const Comparison comparison =
      testing::compare_with_losses(training, trained.training, alone.training);
  EXPECT_LE(comparison.first_gradients, 1);
  EXPECT_LE(comparison.gradients, later_gradients);
  EXPECT_LE(comparison.parameters, 1);
  EXPECT_LE(comparison.losses, 1);
  // Each tensor that enters the norm may differ by a fraction of its largest element.
  EXPECT_LE(worst_norm(trained, alone), 100 * testing::tolerance_of(training));
  // Every norm was above the limit, so every step was clipped.
  EXPECT_THAT(alone.norms, ::testing::Each(::testing::Gt(testing::kAxesMaxNorm)));
}

INSTANTIATE_TEST_SUITE_P(Cases, AxesEquality, ::testing::ValuesIn(testing::share_of(axes_cases())),
                         ::testing::PrintToStringParamName());

struct PlantedMistake {
  std::string name;
  std::string layout;
  AxesMistake mistake;
};

std::ostream& operator<<(std::ostream& out, const PlantedMistake& given) {
  return out << given.name;
}

class AxesMistakes : public ::testing::TestWithParam<PlantedMistake> {};

// Plants a mistake in the training; the bounds must not be so wide that they hide it.
TEST_P(AxesMistakes, AreFound) {
  const AxesCase given{testing::axes_layout(GetParam().layout),
                       {"gpt", "sgd", testing::kAxesRows, torch::kDouble}};
  const std::vector<Tensor> batches = testing::axes_batches(2);
  const AxesTraining alone = train_alone(given, batches);
  const AxesTraining trained = train_on_ranks(given, batches, GetParam().mistake);
  ASSERT_EQ(trained.norms.size(), alone.norms.size());
  EXPECT_GT(testing::compare(given.training, trained.training, alone.training).parameters, 1e3);
  EXPECT_GT(worst_norm(trained, alone), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, AxesMistakes,
    ::testing::Values(PlantedMistake{"NoSumOverTp", "dp_x_tp_sequence", AxesMistake::kNoSumOverTp},
                      PlantedMistake{"NoSumOverDp", "dp_x_tp", AxesMistake::kNoSumOverDp},
                      PlantedMistake{"NoReplicas", "pp_x_dp", AxesMistake::kNoSumOverDp},
                      PlantedMistake{"Untied", "pp_x_tp", AxesMistake::kUntied},
                      PlantedMistake{"SwappedMicrobatches", "pp_x_dp",
                                     AxesMistake::kSwappedMicrobatches},
                      PlantedMistake{"CountedTwice", "dp_x_tp", AxesMistake::kCountedTwice}),
    ::testing::PrintToStringParamName());

}  // namespace
}  // namespace cadre
