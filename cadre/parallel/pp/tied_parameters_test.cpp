// Tests tied parameters, which stages of several ranks share. Ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::run_groups;
using testing::StageNet;
using torch::Tensor;

TEST(PipelineMisuse, TiedParametersThatDriftApartAreFound) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = std::make_shared<StageNet>(group.rank(), 2);
    Pipeline pipeline({{net, {.stage = group.rank(), .num_stages = 2}}}, group);
    pipeline.tie_parameters({{0, "table"}, {1, "head"}});
    pipeline.check_tied_parameters();
    if (group.rank() == 1) {
      const torch::NoGradGuard no_grad;
      net->head[0][0] += 1;
    }
    EXPECT_THAT(failure_of([&] { pipeline.check_tied_parameters(); }),
                HasSubstr("rank 1 has other values"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 1 has two of three tied tensors. Both must be in parameters(), so that its optimizer updates
// both.
TEST(PipelineTies, EveryTiedTensorOfARankIsInItsParameters) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    std::vector<std::shared_ptr<StageNet>> nets;
    std::vector<PipelineStage> stages;
    for (const int stage : {group.rank(), group.rank() + 2}) {
      nets.push_back(std::make_shared<StageNet>(stage, 4));
      stages.emplace_back(nets.back(), PipelineStageOptions{.stage = stage, .num_stages = 4});
    }
    Pipeline pipeline(stages, group, {.schedule = "interleaved-1f1b", .num_microbatches = 2});
    pipeline.tie_parameters({{0, "bias0"}, {1, "bias0"}, {3, "bias0"}});
    const auto parameters = pipeline.parameters();
    for (const auto& net : nets) {
      const auto is_bias = [&](const Tensor& tensor) { return tensor.is_same(net->bias[0]); };
      EXPECT_EQ(std::ranges::count_if(parameters, is_bias), 1) << "stage " << net->stage;
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
