// Tests that a step that fails on one rank ends on all ranks, with the error of that rank. Ranks
// are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::cross_entropy;
using ::testing::HasSubstr;
using testing::run_groups;
using testing::StageNet;
using testing::targets_of;
using testing::tokens_of;
using torch::Tensor;

// The error with which a step of a pipeline failed on one rank.
struct StepFailure {
  std::string text;
  ErrorCode code = ErrorCode::kInternal;
  PipelineAction action;
};

StepFailure failure_of_step(const std::function<void()>& step) {
  try {
    step();
  } catch (const PipelineError& error) {
    return {error.what(), error.code(), error.action()};
  } catch (const std::exception& error) {
    return {std::string("no PipelineError: ") + error.what(), ErrorCode::kInternal, {}};
  }
  return {"no error", ErrorCode::kInternal, {}};
}

TEST(PipelineFailure, AnExceptionInAForwardEndsTheStepOnAllRanks) {
  std::vector<StepFailure> failures(3);
  run_groups(3, [&](const ProcessGroup& group) {
    const auto net = std::make_shared<StageNet>(group.rank(), 3);
    const TensorFunction function = [net](const std::vector<Tensor>& inputs) {
      if (net->stage == 1 && net->num_forwards == 2) throw std::runtime_error("planted");
      return net->forward(inputs);
    };
    Pipeline pipeline({PipelineStage(function, distinct_parameters(*net),
                                     {.stage = group.rank(), .num_stages = 3})},
                      group, {.num_microbatches = 4});
    const Tensor tokens = tokens_of(8, 0);
    failures[group.rank()] =
        failure_of_step([&] { pipeline.step(tokens, targets_of(tokens), cross_entropy); });
  });
  EXPECT_EQ(failures[1].code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(failures[1].action.kind, PipelineActionKind::kForward);
  EXPECT_EQ(failures[1].action.stage, 1);
  EXPECT_EQ(failures[1].action.microbatch, 2);
  for (const int rank : {0, 2}) {
    EXPECT_EQ(failures[rank].code, ErrorCode::kAborted) << failures[rank].text;
    EXPECT_EQ(failures[rank].action.stage, rank);
    EXPECT_THAT(failures[rank].text, HasSubstr("stage 1, microbatch 2, forward (1F2): planted"));
  }
}

// The thrown object is not a std::exception.
TEST(PipelineFailure, AnythingThrownInAForwardEndsTheStepOnAllRanks) {
  std::vector<StepFailure> failures(2);
  run_groups(2, [&](const ProcessGroup& group) {
    const auto net = std::make_shared<StageNet>(group.rank(), 2);
    const TensorFunction function = [net](const std::vector<Tensor>& inputs) {
      if (net->stage == 1) throw 7;
      return net->forward(inputs);
    };
    Pipeline pipeline({PipelineStage(function, distinct_parameters(*net),
                                     {.stage = group.rank(), .num_stages = 2})},
                      group, {.num_microbatches = 2});
    const Tensor tokens = tokens_of(4, 0);
    failures[group.rank()] =
        failure_of_step([&] { pipeline.step(tokens, targets_of(tokens), cross_entropy); });
  });
  EXPECT_EQ(failures[1].code, ErrorCode::kInvalidArgument);
  for (const StepFailure& failure : failures) {
    EXPECT_THAT(failure.text, HasSubstr("stage 1, microbatch 0, forward (1F0): an exception that "
                                        "is no std::exception"));
  }
}

// backward() in one process throws in this case, too.
TEST(PipelineFailure, ALossWithoutAGradientIsRefused) {
  std::vector<StepFailure> failures(2);
  run_groups(2, [&](const ProcessGroup& group) {
    const auto net = std::make_shared<StageNet>(group.rank(), 2);
    Pipeline pipeline({{net, {.stage = group.rank(), .num_stages = 2}}}, group,
                      {.num_microbatches = 2});
    const Tensor tokens = tokens_of(4, 0);
    failures[group.rank()] = failure_of_step([&] {
      pipeline.step(tokens, targets_of(tokens), [](const Tensor& logits, const Tensor& target) {
        return cross_entropy(logits, target).detach();
      });
    });
  });
  for (const StepFailure& failure : failures) {
    EXPECT_THAT(failure.text, HasSubstr("no loss of the step requires grad"));
  }
}

TEST(PipelineFailure, ARankThatIsLostIsNamed) {
  std::vector<StepFailure> failures(2);
  run_groups(2, [&](const ProcessGroup& group) {
    const auto net = std::make_shared<StageNet>(group.rank(), 2);
    const TensorFunction function = [net, group](const std::vector<Tensor>& inputs) {
      if (net->stage == 1 && net->num_forwards == 1) group.close();
      return net->forward(inputs);
    };
    Pipeline pipeline({PipelineStage(function, distinct_parameters(*net),
                                     {.stage = group.rank(), .num_stages = 2})},
                      group, {.num_microbatches = 4});
    const Tensor tokens = tokens_of(8, 0);
    failures[group.rank()] =
        failure_of_step([&] { pipeline.step(tokens, targets_of(tokens), cross_entropy); });
  });
  EXPECT_EQ(failures[0].code, ErrorCode::kPeerLost) << failures[0].text;
  EXPECT_EQ(failures[0].action.stage, 0);
}

TEST(PipelineFailure, AnOutputOfAnotherShapeIsRefusedUnlessShapesAreDynamic) {
  for (const bool is_dynamic : {false, true}) {
    std::vector<StepFailure> failures(2);
    run_groups(2, [&](const ProcessGroup& group) {
      int num_calls = 0;
      const TensorFunction function = [&](const std::vector<Tensor>& inputs) {
        const int64_t width = ++num_calls > 2 ? 3 : 2;
        return std::vector<Tensor>{inputs[0].slice(1, 0, width).to(torch::kDouble)};
      };
      Pipeline pipeline({PipelineStage(function, {}, {.stage = group.rank(), .num_stages = 2})},
                        group, {.num_microbatches = 2, .dynamic_shapes = is_dynamic});
      const Tensor tokens = tokens_of(4, 0);
      failures[group.rank()] = failure_of_step([&] {
        for (int step = 0; step < 2; ++step) pipeline.forward(tokens);
      });
    });
    for (const StepFailure& failure : failures) {
      EXPECT_THAT(failure.text, HasSubstr(is_dynamic ? "no error" : "dynamic_shapes"));
    }
  }
}

}  // namespace
}  // namespace cadre
