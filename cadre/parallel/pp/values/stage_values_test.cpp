// Tests that the next stage gets the values that a result had when the stage returned it, whatever
// both stages do with the memory later: buffers that change in place, inputs that are returned or
// changed in place, views of parameters, one tensor returned twice. The results are compared with
// one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/pp_model.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre::stage_values_test {
namespace {

using testing::filled;
using testing::run_groups;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int kMicrobatches = 3;
constexpr int64_t kRows = 2;  // the number of rows of each microbatch

Tensor mean_square(const Tensor& output, const Tensor& target) {
  return torch::mse_loss(output, target);
}

// The functions and weights of a model of two stages. Each run makes new ones.
struct Model {
  TensorFunction first, second;
  std::vector<NamedTensor> of_first, of_second;
};

struct Values {
  std::string name;
  std::function<Model()> make;
  int64_t width = 3;
};

Tensor weight_of(double offset, int64_t width = 3) {
  return filled({width, width}, offset).requires_grad_();
}

// The function of the first or the second stage. Its second argument is the weight of that stage.
using StageFunction = std::function<Tensors(const Tensors&, const Tensor&)>;
Model model_of(const StageFunction& first, const StageFunction& second, int64_t width = 3) {
  const Tensor a = weight_of(1, width);
  const Tensor b = weight_of(7, width);
  return {.first = [=](const Tensors& x) { return first(x, a); },
          .second = [=](const Tensors& x) { return second(x, b); },
          .of_first = {{"a", a}},
          .of_second = {{"b", b}}};
}

// Returns a stage that keeps a running mean of its inputs in a buffer of `width` numbers, and
// returns what `returned` makes of the buffer.
StageFunction with_memory(int64_t width, const std::function<Tensor(const Tensor&)>& returned) {
  const Tensor memory = torch::zeros({1, width}, torch::kDouble);
  return [=](const Tensors& x, const Tensor& w) -> Tensors {
    {
      const torch::NoGradGuard no_grad;
      memory.mul_(0.5).add_(x[0].mean(0, true));
    }
    return {torch::linear(x[0], w), returned(memory)};
  };
}

Tensors sum_of_both(const Tensors& x, const Tensor& w) {
  return {torch::linear(x[0] + x[1], w)};
}

std::vector<Values> changing_values() {
  const auto itself = [](const Tensor& memory) { return memory; };
  return {
      {"a buffer", [=] { return model_of(with_memory(3, itself), sum_of_both); }},
      // The buffer is larger than what a connection can buffer, so the send is still in flight when
      // the stage changes the buffer.
      {"a large buffer", [=] { return model_of(with_memory(300, itself), sum_of_both, 300); }, 300},
      {"a view of a buffer",
       [] {
         return model_of(
             with_memory(3, [](const Tensor& memory) { return memory.narrow(1, 0, 1); }),
             sum_of_both);
       }},
      {"the input, which the next stage changes",
       [] {
         return model_of(
             [](const Tensors& x, const Tensor& w) -> Tensors {
               return {torch::linear(x[0], w), x[0] + 0.0};
             },
             [](const Tensors& x, const Tensor& w) -> Tensors {
               const Tensor kept = x[0] * 1.0;
               x[0].mul_(2);
               x[1].add_(1);
               return {torch::linear(x[0] + x[1] + kept, w)};
             });
       }},
  };
}

// Returns cases in which returned values share memory, or in which the next stage changes them in
// place.
std::vector<Values> shared_values() {
  return {
      {"a view of a parameter",
       [] {
         return model_of(
             [](const Tensors& x, const Tensor& w) -> Tensors {
               return {torch::linear(x[0], w), w.narrow(0, 0, 1)};
             },
             sum_of_both);
       }},
      {"a parameter",
       [] {
         return model_of(
             [](const Tensors& x, const Tensor& w) -> Tensors {
               return {torch::linear(x[0], w), w};
             },
             [](const Tensors& x, const Tensor& w) -> Tensors {
               return {torch::linear(x[0], x[1] * w)};
             });
       }},
      {"one tensor twice",
       [] {
         return model_of(
             [](const Tensors& x, const Tensor& w) -> Tensors {
               const Tensor y = torch::linear(x[0], w);
               return {y, y};
             },
             [](const Tensors& x, const Tensor& w) -> Tensors {
               return {torch::linear(x[0] * x[1], w)};
             });
       }},
      {"an activation that is changed first",
       [] {
         return model_of(
             [](const Tensors& x, const Tensor& w) -> Tensors { return {torch::linear(x[0], w)}; },
             [](const Tensors& x, const Tensor& w) -> Tensors {
               Tensor hidden = x[0];
               hidden.mul_(3).unsqueeze_(1);
               return {torch::linear(hidden.squeeze(1), w)};
             });
       }},
      {"an activation that the next stage clips",
       [] {
         return model_of(
             [](const Tensors& x, const Tensor& w) -> Tensors { return {torch::linear(x[0], w)}; },
             [](const Tensors& x, const Tensor& w) -> Tensors {
               Tensor hidden = x[0];
               return {torch::linear(hidden.relu_(), w)};
             });
       }},
      {"what autograd has saved",
       [] {
         return model_of(
             [](const Tensors& x, const Tensor& w) -> Tensors {
               return {torch::linear(x[0], w).tanh(), x[0]};
             },
             sum_of_both);
       }},
  };
}

std::vector<Values> all_values() {
  std::vector<Values> values = changing_values();
  for (Values& shared : shared_values()) values.push_back(std::move(shared));
  return values;
}

struct Outcome {
  std::map<std::string, Tensor> gradients;
  double loss = 0;
};

Tensor inputs_of(int64_t width) {
  return filled({kMicrobatches * kRows, width}, 20);
}
Tensor goals_of(int64_t width) {
  return filled({kMicrobatches * kRows, width}, 70);
}

void add_gradients(const std::vector<NamedTensor>& parameters, Outcome& outcome) {
  for (const auto& [name, tensor] : parameters) outcome.gradients[name] = tensor.grad();
}

// Runs the model in one process, one microbatch after the other. Values that change later are
// copied for each microbatch.
Outcome alone(const Values& values) {
  const Model model = values.make();
  Outcome outcome;
  for (int i = 0; i < kMicrobatches; ++i) {
    const Tensor x = inputs_of(values.width).narrow(0, i * kRows, kRows);
    Tensors between = model.first({x});
    for (Tensor& tensor : between) tensor = tensor.clone();
    const Tensor loss =
        mean_square(model.second(between)[0], goals_of(values.width).narrow(0, i * kRows, kRows));
    (loss / kMicrobatches).backward();
    outcome.loss += loss.item<double>() / kMicrobatches;
  }
  add_gradients(model.of_first, outcome);
  add_gradients(model.of_second, outcome);
  return outcome;
}

void expect_equal(const Outcome& actual, const Outcome& expected, const std::string& what) {
  EXPECT_NEAR(actual.loss, expected.loss, 1e-12) << what;
  for (const auto& [name, gradient] : expected.gradients) {
    ASSERT_TRUE(actual.gradients.contains(name)) << what;
    EXPECT_TRUE(torch::allclose(actual.gradients.at(name), gradient, 1e-10, 1e-13))
        << what << ", " << name;
  }
}

// All forwards run before the backwards, so that returned values stay in use as long as possible.
TEST(PipelineValues, AreThoseOfTheReturnOnOneRank) {
  for (const Values& values : all_values()) {
    const Outcome expected = alone(values);
    const auto result = run_groups(1, [&](const ProcessGroup& group) {
      const Model model = values.make();
      Pipeline pipeline({{model.first, model.of_first, {.stage = 0, .num_stages = 2}},
                         {model.second, model.of_second, {.stage = 1, .num_stages = 2}}},
                        group, {.schedule = "looped-bfs", .num_microbatches = kMicrobatches});
      Outcome outcome;
      outcome.loss = pipeline.step(inputs_of(values.width), goals_of(values.width), mean_square)
                         .loss.item<double>();
      add_gradients(model.of_first, outcome);
      add_gradients(model.of_second, outcome);
      expect_equal(outcome, expected, values.name);
    });
    EXPECT_TRUE(result.ok()) << values.name << ": " << result.failures();
  }
}

TEST(PipelineValues, AreThoseOfTheReturnOnTwoRanks) {
  for (const char* schedule : {"gpipe", "zb-h1"}) {
    for (const Values& values : all_values()) {
      const Outcome expected = alone(values);
      std::vector<Outcome> outcomes(2);
      const auto result = run_groups(2, [&](const ProcessGroup& group) {
        const Model model = values.make();
        const bool is_first = group.rank() == 0;
        const PipelineStage stage(is_first ? model.first : model.second,
                                  is_first ? model.of_first : model.of_second,
                                  {.stage = group.rank(), .num_stages = 2});
        Pipeline pipeline({stage}, group,
                          {.schedule = schedule, .num_microbatches = kMicrobatches});
        Outcome& outcome = outcomes[static_cast<size_t>(group.rank())];
        outcome.loss = pipeline
                           .step(inputs_of(values.width), goals_of(values.width), mean_square,
                                 {.broadcast_losses = true})
                           .loss.item<double>();
        add_gradients(stage.parameters(), outcome);
      });
      EXPECT_TRUE(result.ok()) << values.name << ": " << result.failures();
      outcomes[0].gradients.merge(outcomes[1].gradients);
      expect_equal(outcomes[0], expected, values.name + " under " + schedule);
    }
  }
}

// The memory of a sharded stage's parameters is freed before the next stage computes, so the view
// must have been copied.
TEST(PipelineValues, AViewOfAShardedParameterIsThatOfTheForward) {
  const Values values{"a view of a sharded parameter", shared_values()[0].make};
  const Outcome expected = alone(values);
  const auto result = run_groups(1, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"pp", 1}, {"dp", 1}});
    const Model model = values.make();
    Pipeline pipeline({{model.first, model.of_first, {.stage = 0, .num_stages = 2}},
                       {model.second, model.of_second, {.stage = 1, .num_stages = 2}}},
                      mesh["pp"],
                      {.schedule = "looped-bfs",
                       .num_microbatches = kMicrobatches,
                       .shards = mesh["dp"],
                       .max_unsharded_stages = 1});
    const auto step = pipeline.step(inputs_of(3), goals_of(3), mean_square);
    EXPECT_NEAR(step.loss.item<double>(), expected.loss, 1e-12);
    const auto records = pipeline.parameter_shards();
    for (const ParameterShard& record : records) {
      EXPECT_TRUE(torch::allclose(record.values.grad().view({3, 3}),
                                  expected.gradients.at(record.name), 1e-10, 1e-13))
          << record.name;
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre::stage_values_test
