// Tests that wrong use of a pipeline is refused on all ranks before anything is computed, and that
// the group stays usable. A failure during a step ends the step on all ranks; the error names the
// stage, the microbatch and the action.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/tensor/mesh/device_mesh.h"
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

// Runs `body` on two ranks and returns the error that each rank gets. The group must still work
// afterwards.
std::vector<std::string> refusals(const std::function<void(const ProcessGroup&)>& body) {
  std::vector<std::string> texts(2);
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    texts[group.rank()] = failure_of([&] { body(group); });
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return texts;
}

void expect_refused(const std::function<void(const ProcessGroup&)>& body, const std::string& text) {
  for (const std::string& refusal : refusals(body)) {
    EXPECT_THAT(refusal, HasSubstr("kInvalidArgument"));
    EXPECT_THAT(refusal, HasSubstr(text));
  }
}

TEST(PipelineMisuse, StagesAreWhereTheScheduleSays) {
  expect_refused([](const ProcessGroup& group) { Pipeline({stage_of(0, 2)}, group); },
                 "stage 0 of 2 is held by rank 0 and 1; the schedule places it on rank 0 alone");
  expect_refused(
      [](const ProcessGroup& group) { Pipeline({stage_of(1 - group.rank(), 2)}, group); },
      "stage 0 of 2 is held by rank 1; the schedule places it on rank 0 alone");
  expect_refused([](const ProcessGroup& group) { Pipeline({stage_of(group.rank(), 3)}, group); },
                 "of 3 stages, but the schedule is for 2");
  expect_refused([](const ProcessGroup& group) { Pipeline({}, group); }, "holds no stage");
  expect_refused(
      [](const ProcessGroup& group) {
        const int stage = 2 * group.rank();
        Pipeline({stage_of(stage, 4), stage_of(stage, 4)}, group,
                 {.schedule = "interleaved-1f1b", .num_microbatches = 2});
      },
      "twice");
}

TEST(PipelineMisuse, AllRanksHaveOneSchedule) {
  expect_refused(
      [](const ProcessGroup& group) {
        Pipeline({stage_of(group.rank(), 2)}, group,
                 {.schedule = group.rank() == 0 ? "1f1b" : "gpipe", .num_microbatches = 4});
      },
      "the schedule is one of 2 stages and 4 microbatches");
  expect_refused(
      [](const ProcessGroup& group) {
        Pipeline({stage_of(group.rank(), 2)}, group, {.num_microbatches = 4 + group.rank()});
      },
      "of 2 stages and 5 microbatches");
  expect_refused(
      [](const ProcessGroup& group) {
        Pipeline({stage_of(group.rank(), 2)}, group, {.schedule = "2f2b"});
      },
      "there is no schedule \"2f2b\"; there are \"gpipe\"");
  PipelineSchedule for_three;
  for_three.rank_of_stage = {0, 1, 2};
  for_three.ranks.resize(3);
  for_three.num_microbatches = 1;
  expect_refused(
      [&](const ProcessGroup& group) {
        Pipeline({stage_of(group.rank(), 3)}, group, {.schedule = for_three});
      },
      "the schedule is for 3 ranks, but the group has 2");
}

TEST(PipelineMisuse, AScheduleThatDoesNothingIsRefused) {
  PipelineSchedule schedule;
  schedule.rank_of_stage = {0, 1};
  schedule.ranks.resize(2);
  for (const int num_microbatches : {0, -3}) {
    schedule.num_microbatches = num_microbatches;
    expect_refused(
        [&](const ProcessGroup& group) {
          Pipeline({stage_of(group.rank(), 2)}, group, {.schedule = schedule});
        },
        "microbatches; it needs at least one of each");
  }
}

TEST(PipelineMisuse, OneRanksRefusalEndsTheConstructorOnAll) {
  const auto texts = refusals([](const ProcessGroup& group) {
    Pipeline({stage_of(group.rank(), 2)}, group,
             {.schedule = group.rank() == 0 ? "1f1b" : "unknown"});
  });
  for (const std::string& text : texts) {
    EXPECT_THAT(text, HasSubstr("there is no schedule \"unknown\""));
    EXPECT_THAT(text, HasSubstr("(on rank 1 of 2 of group \"world\")"));
  }
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
      {"is given no batch",
       [](Pipeline& pipeline, const Tensor& tokens) { pipeline.step({}, tokens, cross_entropy); }},
      {"is given no target",
       [](Pipeline& pipeline, const Tensor& tokens) { pipeline.step(tokens, {}, cross_entropy); }},
      {"is given no loss function",
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
    EXPECT_THAT(mixed, HasSubstr("rank 0 calls step() and rank 1 forward()"));
    EXPECT_THAT(failure_of([&] {
                  pipeline.tie_parameters({{0, "table"}, {1, "tail"}});
                }),
                HasSubstr("cannot tie tail: stage 1 has no parameter of this name"));
    EXPECT_THAT(failure_of([&] {
                  pipeline.tie_parameters({{0, "table"}, {1, "bias0"}});
                }),
                HasSubstr("\"table\" of stage 0 is Double (11, 6), but \"bias0\" of stage 1 is "
                          "Double (6)"));
    // The pipeline still works after all these errors.
    EXPECT_EQ(failure_of([&] { pipeline.step(tokens, targets_of(tokens), cross_entropy); }), "");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(PipelineMisuse, AMeshHasOneAxis) {
  expect_refused(
      [](const ProcessGroup& group) {
        const DeviceMesh mesh(group, {{"dp", 1}, {"pp", 2}});
        Pipeline({stage_of(group.rank(), 2)}, mesh);
      },
      "has 2 axes; pass one of them: mesh[\"pp\"]");
}

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

// Rank 1 has two of three tied tensors. Its parameters contain both.
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

// The error of a rank that ran `body` with a pipeline of two stages.
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

// In one process backward() throws in this case, too.
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
      EXPECT_THAT(failure_of(call), HasSubstr("this pipeline has been moved from"));
    }
    pipeline = std::move(taken);
    EXPECT_EQ(failure_of([&] { pipeline.step(tokens, tokens, cross_entropy); }), "");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(PipelineMisuse, AMovedFromStageIsRefused) {
  expect_refused(
      [](const ProcessGroup& group) {
        std::vector<PipelineStage> stages{stage_of(group.rank(), 2)};
        const PipelineStage taken = std::move(stages[0]);
        Pipeline(stages, group);
      },
      "has been moved from");
}

// A null function is not accepted as a loss.
TEST(PipelineMisuse, ANullLossIsRefused) {
  expect_refused(
      [](const ProcessGroup& group) {
        Pipeline pipeline({stage_of(group.rank(), 2)}, group);
        const std::function<Tensor(const Tensor&, const Tensor&)> null;
        pipeline.step(tokens_of(2, 0), tokens_of(2, 0), null);
      },
      "is given no loss function");
}

TEST(PipelineStage, RefusesWhatIsNoStage) {
  const std::shared_ptr<StageNet> none;
  EXPECT_THAT(failure_of([&] { PipelineStage(none, {.stage = 0, .num_stages = 2}); }),
              HasSubstr("is empty"));
  const auto net = std::make_shared<StageNet>(0, 2);
  EXPECT_THAT(failure_of([&] { PipelineStage(net, {.stage = 2, .num_stages = 2}); }),
              HasSubstr("there is no stage 2 of 2"));
}

// These modules cover all signatures of forward() that a stage may have.
struct TwoTensors : torch::nn::Module {
  std::tuple<Tensor, Tensor> forward(const Tensor& a, Tensor b) { return {a + b, b}; }
};

TEST(PipelineStage, CallsModulesOfEveryForm) {
  const PipelineStage two(std::make_shared<TwoTensors>(), {});
  const Tensor one = torch::ones({2});
  EXPECT_EQ(two.forward({one, one})[0].sum().item<double>(), 4);
  EXPECT_THAT(failure_of([&] { two.forward({one}); }), HasSubstr("takes 2 tensors and is given 1"));
  const PipelineStage sequential(torch::nn::Sequential(torch::nn::Identity()), {});
  EXPECT_EQ(sequential.forward({one}).size(), 1u);
  EXPECT_EQ(PipelineStage(torch::nn::Linear(2, 3), {}).parameters().size(), 2u);
}

}  // namespace
}  // namespace cadre
