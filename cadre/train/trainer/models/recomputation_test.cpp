// Tests model.checkpoint_activations of each model: how many layers are recomputed in backward, and
// that forward does not keep their activations.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <string>
#include <vector>

#include "cadre/train/trainer/models/image_classifier.h"
#include "cadre/train/trainer/models/language_model.h"

namespace cadre::train {
namespace {

// Returns the number of autograd nodes whose name contains `part`.
int64_t num_nodes(const at::Tensor& output, const std::string& part) {
  std::set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> next = {output.grad_fn().get()};
  int64_t count = 0;
  while (!next.empty()) {
    torch::autograd::Node* node = next.back();
    next.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    if (node->name().find(part) != std::string::npos) ++count;
    for (const auto& edge : node->next_edges()) next.push_back(edge.function.get());
  }
  return count;
}

TEST(RecomputedActivations, AreThoseOfEachBlock) {
  const auto images = torch::rand({2, 1, 28, 28});
  const auto tokens = torch::randint(0, 40, {2, 8}, torch::kLong);
  for (const bool is_recomputed : {false, true}) {
    ModelConfig config = {.layers = 3, .heads = 2, .width = 16, .context = 8};
    config.checkpoint_activations = is_recomputed ? "blocks" : "none";
    for (const std::string kind : {"gpt", "mlp", "experts"}) {
      config.kind = kind == "mlp" ? "mlp" : "gpt";
      config.experts = kind == "experts" ? 2 : 0;
      const auto output = make_language_model(config, 40, /*seed=*/1)->forward(tokens);
      const int num_mlps = kind == "experts" ? 6 : 3;
      EXPECT_EQ(num_nodes(output, "Checkpoint"), is_recomputed ? 3 : 0) << kind;
      EXPECT_EQ(num_nodes(output, "Gelu"), is_recomputed ? 0 : num_mlps) << kind;
    }
    config.experts = 0;
    for (const std::string kind : {"mlp", "cnn"}) {
      config.kind = kind;
      const auto output = make_image_classifier(config, /*seed=*/1)->forward(images);
      const int num_layers = kind == "cnn" ? 1 : 3;
      EXPECT_EQ(num_nodes(output, "Checkpoint"), is_recomputed ? num_layers : 0) << kind;
      EXPECT_EQ(num_nodes(output, "Convolution"), is_recomputed || kind == "mlp" ? 0 : 2) << kind;
    }
  }
}

}  // namespace
}  // namespace cadre::train
