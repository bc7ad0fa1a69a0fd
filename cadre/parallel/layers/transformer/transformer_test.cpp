// Compares the layers of a transformer, in one process, with functions of libtorch.
#include "cadre/parallel/layers/transformer/transformer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <string>
#include <vector>

#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::transformer_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;

constexpr TransformerOptions kOptions{
    .vocabulary = 7, .context = 6, .embed_dim = 8, .num_heads = 4, .num_blocks = 2};

// Converts the module to float64 and gives each parameter different random values.
void randomize(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  module.to(torch::kDouble);
  for (Tensor& parameter : module.parameters()) parameter.normal_().mul_(0.4);
}

Tensor normed(const LayerNorm& norm, const Tensor& x) {
  return torch::layer_norm(x, {x.size(-1)}, norm->weight, norm->bias);
}

TEST(Transformer, ABlockAddsAttentionAndMlpBehindNorms) {
  torch::manual_seed(1);
  TransformerBlock block(kOptions);
  randomize(*block);
  const Tensor x = torch::randn({2, 5, 8}, torch::kDouble);
  const Tensor heads = torch::linear(normed(block->norm_1, x), block->attention->qkv->weight,
                                     block->attention->qkv->bias)
                           .view({2, 5, 4, 3, 2})
                           .permute({3, 0, 2, 1, 4});
  const Tensor mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0,
                                                        /*is_causal=*/true)
                           .transpose(1, 2)
                           .reshape({2, 5, 8});
  const Tensor h =
      x + torch::linear(mixed, block->attention->output->weight, block->attention->output->bias);
  const Tensor hidden =
      torch::gelu(torch::linear(normed(block->norm_2, h), block->up->weight, block->up->bias));
  EXPECT_EQ(hidden.size(2), 32);
  const Tensor expected = h + torch::linear(hidden, block->down->weight, block->down->bias);
  EXPECT_TRUE(torch::allclose(block(x), expected, 1e-11, 1e-12));
}

TEST(Transformer, ATiedHeadUsesTheTableThatTheEmbeddingRegisters) {
  torch::manual_seed(2);
  const TransformerEmbedding embedding(kOptions);
  const TransformerHead head(embedding);
  torch::nn::Sequential model(embedding, head);
  randomize(*model);
  EXPECT_EQ(head->shared_module(), embedding->tokens.ptr());
  std::vector<std::string> names;
  for (const auto& parameter : model->named_parameters()) names.push_back(parameter.key());
  EXPECT_THAT(names, ::testing::ElementsAre("0.tokens.weight", "0.positions.weight",
                                            "1.norm.weight", "1.norm.bias"));
  const Tensor tokens = torch::tensor({{3, 0, 6}, {1, 1, 2}});
  const Tensor table = embedding->tokens->weight;
  const Tensor x = torch::embedding(table, tokens) + embedding->positions->weight.slice(0, 0, 3);
  const Tensor expected = torch::matmul(normed(head->norm, x), table.t());
  const Tensor logits = model->forward(tokens);
  EXPECT_TRUE(torch::allclose(logits, expected, 1e-11, 1e-12));
  logits.pow(2).sum().backward();
  const Tensor expected_gradient = torch::autograd::grad({expected.pow(2).sum()}, {table}).front();
  EXPECT_TRUE(torch::allclose(table.grad(), expected_gradient, 1e-11, 1e-12));
}

TEST(Transformer, AHeadOfItsOwnHasAWeight) {
  TransformerHead head(kOptions);
  randomize(*head);
  EXPECT_EQ(head->shared_module(), nullptr);
  const Tensor x = torch::randn({2, 3, 8}, torch::kDouble);
  const Tensor expected = torch::matmul(normed(head->norm, x), head->output->weight.t());
  EXPECT_TRUE(torch::allclose(head(x), expected, 1e-11, 1e-12));
}

// The standard deviation of n numbers has a relative error of 1 / sqrt(2 n), here at most 1.6%.
TEST(Transformer, TheInitialValuesAreThoseOfGpt2) {
  torch::manual_seed(3);
  constexpr TransformerOptions kWide{
      .vocabulary = 64, .context = 32, .embed_dim = 64, .num_heads = 4, .num_blocks = 8};
  const TransformerEmbedding embedding(kWide);
  const TransformerBlock block(kWide);
  const TransformerHead head(kWide);
  const auto share = [](const Tensor& weight, double std) {
    return weight.std().item<double>() / std;
  };
  EXPECT_NEAR(share(embedding->tokens->weight, 0.02), 1, 0.07);
  EXPECT_NEAR(share(embedding->positions->weight, 0.02), 1, 0.07);
  EXPECT_NEAR(share(block->attention->qkv->weight, 0.02), 1, 0.07);
  EXPECT_NEAR(share(block->up->weight, 0.02), 1, 0.07);
  EXPECT_NEAR(share(head->output->weight, 0.02), 1, 0.07);
  EXPECT_NEAR(share(block->attention->output->weight, 0.005), 1, 0.07);
  EXPECT_NEAR(share(block->down->weight, 0.005), 1, 0.07);
  for (const Linear& layer :
       {block->attention->qkv, block->attention->output, block->up, block->down}) {
    EXPECT_EQ(layer->bias.abs().sum().item<float>(), 0);
  }
}

TEST(Transformer, ARecomputedBlockKeepsItsInputAndHasTheSameGradients) {
  TransformerOptions recomputing = kOptions;
  recomputing.recompute = true;
  torch::manual_seed(4);
  TransformerBlock plain(kOptions);
  randomize(*plain);
  torch::manual_seed(4);
  TransformerBlock recomputed(recomputing);
  randomize(*recomputed);
  const Tensor x = torch::randn({2, 5, 8}, torch::kDouble);
  const Tensor expected = plain(x);
  const Tensor output = recomputed(x);
  EXPECT_FALSE(is_checkpoint(*expected.grad_fn()));
  EXPECT_TRUE(is_checkpoint(*output.grad_fn()));
  EXPECT_TRUE(torch::equal(output, expected));
  expected.pow(2).sum().backward();
  output.pow(2).sum().backward();
  const auto gradients = recomputed->named_parameters();
  for (const auto& parameter : plain->named_parameters()) {
    EXPECT_TRUE(torch::equal(gradients[parameter.key()].grad(), parameter.value().grad()))
        << parameter.key();
  }
}

TEST(Transformer, RefusesWhatDoesNotFit) {
  constexpr auto kInvalid = ErrorCode::kInvalidArgument;
  TransformerOptions options = kOptions;
  options.num_blocks = 0;
  EXPECT_THAT(error_of([&] { TransformerBlock block(options); }, kInvalid),
              HasSubstr("num_blocks 0 and mlp_dim 32 must be at least 1"));
  options = kOptions;
  options.num_heads = 3;
  EXPECT_THAT(error_of([&] { TransformerBlock block(options); }, kInvalid),
              HasSubstr("embed_dim 8 must be a multiple of num_heads 3"));
  EXPECT_THAT(error_of([] { TransformerHead head(TransformerEmbedding(nullptr)); }, kInvalid),
              HasSubstr("the embedding is empty"));
  TransformerEmbedding embedding(kOptions);
  for (const Tensor& tokens :
       {torch::zeros({1, 7}, torch::kLong), torch::zeros({1, 0}, torch::kLong),
        torch::zeros({6}, torch::kLong)}) {
    EXPECT_THAT(error_of([&] { embedding(tokens); }, kInvalid),
                HasSubstr("expected (B, T) with T from 1 to 6"));
  }
}

}  // namespace
}  // namespace cadre::transformer_test
