// Tests that invalid calls of a pipeline throw on all ranks before anything is computed, and that
// the group stays usable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::cross_entropy;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::run_groups;
using testing::StageNet;
using testing::targets_of;
using testing::tokens_of;
using torch::Tensor;

PipelineStage stage_of(int stage, int num_stages) {
  return {std::make_shared<StageNet>(stage, num_stages),
          {.stage = stage, .num_stages = num_stages}};
}

TEST(PipelineMisuse, StepsAreCheckedBeforeTheyRun) {
  struct Wrong {
    std::string text;
    std::function<void(Pipeline&, const Tensor& tokens)> call;
  };
  const std::vector<Wrong> wrongs = {
      {"4 microbatches do not divide the 6 rows of the ",
       [](Pipeline& pipeline, const Tensor&) {
         pipeline.step(tokens_of(6, 0), tokens_of(6, 0), cross_entropy);
       }},
      {"must be given the batch",
       [](Pipeline& pipeline, const Tensor& tokens) { pipeline.step({}, tokens, cross_entropy); }},
      {"must be given the target",
       [](Pipeline& pipeline, const Tensor& tokens) { pipeline.step(tokens, {}, cross_entropy); }},
      {"so it needs a loss function",
       [](Pipeline& pipeline, const Tensor& tokens) { pipeline.step(tokens, tokens, {}); }},
      {"the target 4 on rank 1",
       [](Pipeline& pipeline, const Tensor& tokens) {
         pipeline.step(tokens, tokens.slice(0, 0, 4), cross_entropy);
       }},
      {"requires grad",
       [](Pipeline& pipeline, const Tensor&) {
         pipeline.step(torch::zeros({8, 5}).requires_grad_(), tokens_of(8, 0), cross_entropy);
       }},
      {"has no rows",
       [](Pipeline& pipeline, const Tensor& tokens) {
         pipeline.step(torch::tensor(1.0), tokens, cross_entropy);
       }},
  };
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    Pipeline pipeline({stage_of(group.rank(), 2)}, group, {.num_microbatches = 4});
    const Tensor tokens = tokens_of(8, 0);
    for (const Wrong& wrong : wrongs) {
      const std::string text = failure_of([&] { wrong.call(pipeline, tokens); });
      EXPECT_THAT(text, HasSubstr(wrong.text));
    }
    const std::string mixed = failure_of([&] {
      if (group.rank() == 0) {
        pipeline.step(tokens, targets_of(tokens), cross_entropy);
      } else {
        pipeline.forward(tokens);
      }
    });
    EXPECT_THAT(mixed, HasSubstr("rank 0 calls step() and rank 1 calls forward()"));
    EXPECT_THAT(failure_of([&] {
                  pipeline.tie_parameters({{0, "table"}, {1, "tail"}});
                }),
                HasSubstr("cannot tie tail: stage 1 has no parameter of this name"));
    EXPECT_THAT(failure_of([&] {
                  pipeline.tie_parameters({{0, "table"}, {1, "bias0"}});
                }),
                HasSubstr("\"table\" of stage 0 is Double (11, 6), but \"bias0\" of stage 1 is "
                          "Double (6)"));
    // The pipeline still works after all of these errors.
    EXPECT_EQ(failure_of([&] { pipeline.step(tokens, targets_of(tokens), cross_entropy); }), "");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(PipelineMisuse, AMovedFromPipelineSaysSo) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const auto net = std::make_shared<StageNet>(0, 1);
    Pipeline pipeline({{net, {}}}, group);
    Pipeline taken = std::move(pipeline);
    const Tensor tokens = tokens_of(2, 0);
    const std::vector<std::function<void()>> calls = {
        [&] { pipeline.step(tokens, tokens, cross_entropy); },
        [&] { pipeline.forward(tokens); },
        [&] {
          pipeline.tie_parameters({{0, "table"}, {0, "head"}});
        },
        [&] { pipeline.check_tied_parameters(); },
        [&] { static_cast<void>(pipeline.parameters()); },
        [&] { static_cast<void>(pipeline.parameter_shards()); },
        [&] { static_cast<void>(pipeline.schedule()); },
    };
    for (const auto& call : calls) {
      EXPECT_THAT(failure_of(call), HasSubstr("this pipeline was moved from"));
    }
    pipeline = std::move(taken);
    EXPECT_EQ(failure_of([&] { pipeline.step(tokens, tokens, cross_entropy); }), "");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
