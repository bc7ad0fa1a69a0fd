// Tests that an input pass followed by a weight pass gives the same gradients as a plain backward,
// bit for bit, on graphs with and without weights that several operations share. Also tests that
// the input pass leaves the gradients of weights with one use to the weight pass.
#include "cadre/parallel/pp/split_backward.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/tensor/hooks/activations/activation_checkpoint.h"

namespace cadre::parallel {
namespace {

using torch::Tensor;

struct Graph {
  std::string name;
  // A function (inputs, weights) -> outputs, which builds the graph.
  std::function<std::vector<Tensor>(const std::vector<Tensor>&, const std::vector<Tensor>&)> run;
  bool has_deferred_weight = true;
};

std::vector<Graph> graphs() {
  using Values = std::vector<Tensor>;
  return {
      {"chain",
       [](const Values& x, const Values& w) -> Values {
         return {torch::linear(torch::tanh(torch::linear(x[0], w[0], w[1])), w[2])};
       }},
      {"layer_norm",
       [](const Values& x, const Values& w) -> Values {
         return {torch::linear(torch::layer_norm(x[0], {4}, w[1], w[3]), w[0])};
       }},
      {"shared_weight",
       [](const Values& x, const Values& w) -> Values {
         return {torch::linear(torch::tanh(torch::linear(torch::linear(x[0], w[0]), w[0])), w[2])};
       }},
      {"only_shared_weights",
       [](const Values& x, const Values& w) -> Values {
         return {torch::linear(torch::tanh(torch::linear(x[0], w[0])), w[0])};
       },
       false},
      {"transformed_weight",
       [](const Values& x, const Values& w) -> Values {
         return {torch::linear(x[0], w[0] * w[1] / w[0].norm()) * w[3]};
       }},
      {"two_outputs_one_without_input",
       [](const Values& x, const Values& w) -> Values {
         return {torch::linear(x[0], w[0]), (w[2] * w[2]).sum()};
       }},
      {"two_inputs_residual",
       [](const Values& x, const Values& w) -> Values {
         const Tensor hidden = x[0] + torch::linear(x[1], w[0], w[1]);
         return {hidden + torch::tanh(torch::linear(hidden, w[2])), x[1]};
       }},
      {"unused_input",
       [](const Values& x, const Values& w) -> Values {
         return {torch::linear(x[1], w[0], w[1])};
       }},
      {"checkpointed",
       [](const Values& x, const Values& w) -> Values {
         const auto block = [w](const Values& given) -> Values {
           return {torch::tanh(torch::linear(given[0], w[0], w[1]))};
         };
         return {torch::linear(checkpoint(block, {x[0]})[0], w[2])};
       }},
      {"checkpointed_argument_with_a_weight",
       [](const Values& x, const Values& w) -> Values {
         const auto block = [w](const Values& given) -> Values {
           return {torch::tanh(torch::linear(given[0] + given[1], w[0]))};
         };
         return {torch::linear(checkpoint(block, {x[0], torch::tanh(w[1])})[0], w[2])};
       }},
      {"weights_without_elements",
       [](const Values& x, const Values& w) -> Values {
         const Tensor hidden = torch::linear(torch::linear(x[0], w[4], w[5]), w[6]);
         return {torch::linear(x[0] + hidden, w[0])};
       }},
  };
}

struct Gradients {
  std::vector<Tensor> of_inputs;
  std::vector<Tensor> of_weights;
};

std::vector<Tensor> make_weights() {
  torch::manual_seed(1);
  std::vector<Tensor> weights;
  for (const auto& sizes :
       std::vector<std::vector<int64_t>>{{4, 4}, {4}, {4, 4}, {4}, {0, 4}, {0}, {4, 0}}) {
    weights.push_back(torch::randn(sizes, torch::kDouble).requires_grad_());
  }
  return weights;
}

std::vector<Tensor> make_inputs(bool requires_grad) {
  torch::manual_seed(2);
  return {torch::randn({3, 4}, torch::kDouble).requires_grad_(requires_grad),
          torch::randn({3, 4}, torch::kDouble).requires_grad_(requires_grad)};
}

std::vector<Tensor> gradients_like(const std::vector<Tensor>& outputs) {
  std::vector<Tensor> gradients;
  for (const Tensor& output : outputs) {
    gradients.push_back(torch::arange(output.numel(), torch::kDouble).cos().view(output.sizes()));
  }
  return gradients;
}

std::vector<Tensor> gradients_of(const std::vector<Tensor>& leaves) {
  std::vector<Tensor> gradients;
  for (const Tensor& leaf : leaves) gradients.push_back(leaf.grad());
  return gradients;
}

Gradients plain(const Graph& graph, bool inputs_require_grad) {
  const auto inputs = make_inputs(inputs_require_grad);
  const auto weights = make_weights();
  const auto outputs = graph.run(inputs, weights);
  StageGraph stage(outputs, inputs);
  Gradients result{.of_inputs = stage.backward(gradients_like(outputs)), .of_weights = {}};
  result.of_weights = gradients_of(weights);
  return result;
}

void expect_equal(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected,
                  const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << what << " " << i;
    if (!actual[i].defined()) continue;
    // If a weight is used several times, its gradients may be added in another order, so the bits
    // may differ.
    EXPECT_TRUE(torch::allclose(actual[i], expected[i], 1e-14, 1e-14)) << what << " " << i;
  }
}

TEST(SplitBackward, EqualsAPlainBackward) {
  for (const Graph& graph : graphs()) {
    for (const bool inputs_require_grad : {true, false}) {
      const std::string name = graph.name + (inputs_require_grad ? "" : " of data");
      const Gradients expected = plain(graph, inputs_require_grad);
      const auto inputs = make_inputs(inputs_require_grad);
      const auto weights = make_weights();
      const auto outputs = graph.run(inputs, weights);
      StageGraph stage(outputs, inputs);
      const auto of_inputs = stage.input_pass(gradients_like(outputs));
      expect_equal(of_inputs, expected.of_inputs, name + ", input");
      size_t num_deferred = 0;
      for (size_t i = 0; i < weights.size(); ++i) {
        if (expected.of_weights[i].defined() && !weights[i].grad().defined()) ++num_deferred;
      }
      EXPECT_EQ(num_deferred > 0, graph.has_deferred_weight || !inputs_require_grad) << name;
      stage.weight_pass();
      expect_equal(gradients_of(weights), expected.of_weights, name + ", weight");
    }
  }
}

// The second microbatch adds its gradients to those of the first.
TEST(SplitBackward, AddsToTheGradientsThatAreThere) {
  const Graph graph = graphs()[2];
  const Gradients once = plain(graph, true);
  const auto weights = make_weights();
  for (int microbatch = 0; microbatch < 2; ++microbatch) {
    const auto inputs = make_inputs(true);
    const auto outputs = graph.run(inputs, weights);
    StageGraph stage(outputs, inputs);
    stage.input_pass(gradients_like(outputs));
    stage.weight_pass();
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!once.of_weights[i].defined()) continue;
    EXPECT_TRUE(torch::allclose(weights[i].grad(), 2 * once.of_weights[i], 1e-14, 1e-14)) << i;
  }
}

}  // namespace
}  // namespace cadre::parallel
