// Tests the outputs and losses that a step returns. Ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::joined_outputs_test {
namespace {

using testing::failure_of;
using testing::filled;
using ::testing::HasSubstr;
using testing::run_groups;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int kMicrobatches = 3;
constexpr int64_t kRows = 2;  // the number of rows of each microbatch

// Outputs have the shape (T, B, D), as those of torch::nn::TransformerEncoder, so their rows are
// along dimension 1.
TEST(PipelineValues, OutputsAreJoinedAlongTheirRows) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const PipelineStage stage(
        [](const Tensors& x) -> Tensors {
          return {x[0].dim() == 3 && x[0].size(0) == kRows ? x[0].transpose(0, 1) : x[0]};
        },
        {}, {.stage = group.rank(), .num_stages = 2});
    Pipeline pipeline({stage}, group, {.num_microbatches = kMicrobatches});
    const Tensor x = filled({kMicrobatches * kRows, 5, 3}, 1);
    const auto joined =
        pipeline.forward(x, {}, {}, {.return_outputs = true, .outputs_batch_dim = -2}).outputs;
    if (group.rank() == 1) {
      EXPECT_TRUE(torch::equal(joined.at(0), x.transpose(0, 1)));
    }
    EXPECT_EQ(failure_of([&] { pipeline.forward(x, {}, {}, {}); }), "");
    const std::string refusal = failure_of([&] { pipeline.forward(x); });
    if (group.rank() == 0) return;  // rank 0 gets the error only in its next call
    EXPECT_THAT(refusal, HasSubstr("output 0 of microbatch 0 has the sizes (5, 2, 3), whose "
                                   "dimension 0 does not count the 2 rows of the microbatch"));
  });
}

// The last stage returns the same buffers in each microbatch: a counter, and a running loss. The
// results must be copies.
TEST(PipelineValues, OutputsAndLossesAreThoseOfTheirMicrobatch) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const Tensor counts = torch::zeros({kRows});
    const Tensor weight = torch::ones({}).requires_grad_();
    const PipelineStage stage(
        [=](const Tensors& x) -> Tensors {
          const torch::NoGradGuard no_grad;
          counts.add_(1);
          const torch::AutoGradMode with_grad(true);
          return {counts, x[0] * weight};
        },
        {{"weight", weight}}, {});
    Pipeline pipeline({stage}, group, {.num_microbatches = kMicrobatches});
    const Tensor running = torch::zeros({});
    const Tensor x = torch::ones({kMicrobatches * kRows});
    const auto evaluated =
        pipeline.forward(x, x, [=](const Tensors&, const Tensors&) { return running.add_(1); });
    EXPECT_TRUE(torch::equal(evaluated.losses, torch::tensor({1.0, 2.0, 3.0}, torch::kDouble)));
    EXPECT_TRUE(torch::equal(evaluated.outputs[0], torch::tensor({1.0, 1.0, 2.0, 2.0, 3.0, 3.0})));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::joined_outputs_test
