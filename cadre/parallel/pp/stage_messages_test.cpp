// Tests that messages of several pipelines and of the program, on the same group, are never
// confused with each other, whatever their tags are. Ranks are threads.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::stage_messages_test {
namespace {

using testing::cross_entropy;
using testing::failure_of;
using testing::require;
using testing::run_groups;
using testing::StageNet;
using testing::targets_of;
using testing::tokens_of;
using torch::Tensor;

// The program uses 20 tags, because 2 stages with 4 microbatches use up to 16 tags in the
// pipeline's own message space.
constexpr int kTags = 20;

double loss_of_step(Pipeline& pipeline, int step) {
  const Tensor tokens = tokens_of(8, step);
  return pipeline.step(tokens, targets_of(tokens), cross_entropy, {.broadcast_losses = true})
      .loss.item<double>();
}

struct Pair {
  explicit Pair(const ProcessGroup& group)
      : net(std::make_shared<StageNet>(group.rank(), 2)),
        pipeline({{net, {.stage = group.rank(), .num_stages = 2}}}, group,
                 {.num_microbatches = 4}) {
    pipeline.tie_parameters({{0, "table"}, {1, "head"}});
  }

  std::shared_ptr<StageNet> net;
  Pipeline pipeline;
};

// The program starts sends in both directions before the step, and receives these messages only
// after the step.
TEST(PipelineMessages, ThoseOfTheProgramAreNotTakenForThem) {
  double expected = 0;
  double sum_of_gradients = 0;
  const auto plain = run_groups(2, [&](const ProcessGroup& group) {
    Pair pair(group);
    const double loss = loss_of_step(pair.pipeline, 0);
    if (group.rank() == 0) {
      expected = loss;
      sum_of_gradients = pair.net->table.grad().abs().sum().item<double>();
    }
  });
  ASSERT_TRUE(plain.ok()) << plain.failures();
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    Pair pair(group);
    const int other = 1 - group.rank();
    std::vector<Work> sends;
    const auto numbers = [](int rank, int tag) {
      return torch::full({100 * rank + tag + 1}, 1000.0 * rank + tag, torch::kDouble);
    };
    for (int tag = 0; tag < kTags; ++tag) {
      sends.push_back(group.send_async(numbers(group.rank(), tag), other, {.tag = tag}));
    }
    EXPECT_EQ(loss_of_step(pair.pipeline, 0), expected);
    if (group.rank() == 0) {
      EXPECT_EQ(pair.net->table.grad().abs().sum().item<double>(), sum_of_gradients);
    }
    for (int tag = 0; tag < kTags; ++tag) {
      const Tensor received = torch::zeros_like(numbers(other, tag));
      if (tag % 2 == 0) {
        EXPECT_EQ(group.recv_from_any(received, {.tag = tag}), other);
      } else {
        group.recv(received, other, {.tag = tag});
      }
      EXPECT_TRUE(torch::equal(received, numbers(other, tag))) << tag;
    }
    for (const Work& send : sends) send.wait();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The program posts a receive before the step. It must match the program's message, not one of the
// pipeline.
TEST(PipelineMessages, AReceiveOfTheProgramDoesNotTakeThem) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    Pair pair(group);
    const int other = 1 - group.rank();
    std::vector<Tensor> received;
    std::vector<Work> receives;
    for (int tag = 0; tag < kTags; ++tag) {
      received.push_back(torch::zeros({1}));
      receives.push_back(group.recv_async(received.back(), other, {.tag = tag}));
    }
    loss_of_step(pair.pipeline, 0);
    for (int tag = 0; tag < kTags; ++tag) {
      group.send(torch::full({1}, tag + 0.5), other, {.tag = tag});
    }
    for (int tag = 0; tag < kTags; ++tag) {
      receives[static_cast<size_t>(tag)].wait();
      EXPECT_EQ(received[static_cast<size_t>(tag)].item<double>(), tag + 0.5);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Two pipelines on one group run steps in turn. Later one of them is destroyed and a third one is
// made.
TEST(PipelineMessages, PipelinesOfOneGroupDoNotMeet) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    Pair first(group);
    auto second = std::make_unique<Pair>(group);
    const double expected = loss_of_step(first.pipeline, 0);
    EXPECT_EQ(loss_of_step(second->pipeline, 0), expected);
    second.reset();
    Pair third(group);
    EXPECT_EQ(loss_of_step(third.pipeline, 0), expected);
    first.net->zero_grad();
    EXPECT_EQ(loss_of_step(first.pipeline, 0), expected);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A stage that calls `wait` before it computes, so that a test can delay it.
struct Waiting : torch::nn::Module {
  explicit Waiting(std::function<void()> given) : wait(std::move(given)) {
    weight = register_parameter("weight", torch::ones({1}, torch::kDouble));
  }
  Tensor forward(const Tensor& rows) {
    if (wait) wait();
    return rows * weight;
  }

  std::function<void()> wait;
  Tensor weight;
};

std::string failure_of_step(const ProcessGroup& group, const std::function<void()>& wait,
                            const PipelineStepOptions& options) {
  Pipeline pipeline({{std::make_shared<Waiting>(wait), {.stage = group.rank(), .num_stages = 2}}},
                    group);
  group.barrier();
  const Tensor rows = torch::ones({2, 1}, torch::kDouble);
  const PipelineLoss loss = [](const Tensor& output, const Tensor& target) {
    return (output - target).pow(2).mean();
  };
  return failure_of([&] { pipeline.step(rows, rows, loss, options); });
}

// The stage of rank 0 waits for a message that is never sent, until the group fails.
TEST(PipelineMessages, AWaitForAMessageEndsAtTheTimeoutOfTheStep) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const Tensor never = torch::zeros({1});
    const bool is_late = group.rank() == 0;
    const std::string failure =
        failure_of_step(group, is_late ? [&] { group.recv(never, 1); } : std::function<void()>(),
                        is_late ? PipelineStepOptions{}
                                : PipelineStepOptions{.timeout = std::chrono::milliseconds(300)});
    require(!failure.empty(), "the step must fail on both ranks");
    if (is_late) return;
    require(failure.starts_with("kTimeout: "), failure);
    require(failure.find("receive of the input") != std::string::npos, failure);
    require(failure.find("rank 0") != std::string::npos, failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(PipelineMessages, AWaitForTheArgumentsEndsAtTheTimeoutOfTheStep) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const std::string failure = failure_of([&] {
      Pair pair(group);
      group.barrier();
      if (group.rank() == 0) return group.recv(torch::zeros({1}), 1);
      const Tensor tokens = tokens_of(8, 0);
      pair.pipeline.step(tokens, targets_of(tokens), cross_entropy,
                         {.timeout = std::chrono::milliseconds(20)});
    });
    require(!failure.empty(), "the step must fail on both ranks");
    require(group.rank() == 0 || failure.starts_with("kTimeout: "), failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(PipelineMessages, ATimeoutThatIsNotPositiveIsRefusedOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    Pair pair(group);
    const Tensor tokens = tokens_of(8, 0);
    const auto step = [&](const PipelineStepOptions& options) {
      pair.pipeline.step(tokens, targets_of(tokens), cross_entropy, options);
    };
    for (const int timeout : {0, -1}) {
      PipelineStepOptions options;
      if (group.rank() == 1) options.timeout = std::chrono::milliseconds(timeout);
      const std::string failure = failure_of([&] { step(options); });
      require(failure.find("the timeout of the step is " + std::to_string(timeout) + " ms") !=
                  std::string::npos,
              failure);
    }
    step({});  // the group is usable
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::stage_messages_test
