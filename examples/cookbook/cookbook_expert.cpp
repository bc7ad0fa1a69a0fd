// Expert parallelism: layers with several MLPs, the experts, of which a router selects two for each
// token. Each rank has some of the experts and some of the rows. Another decoder than that of the
// other recipes, so its loss is that of this program on one rank.
#include "cookbook.h"

struct ExpertBlockImpl : torch::nn::Module {
  ExpertBlockImpl() {
    attention = register_module("attention", cadre::SelfAttention(cadre::SelfAttentionOptions{
                                                 .embed_dim = 128, .num_heads = 4}));
    experts =
        register_module("experts", cadre::MixtureOfExperts(cadre::MixtureOfExpertsOptions{
                                       .features = 128, .hidden_features = 128, .num_experts = 8}));
    norm_1 = register_module("norm_1", cadre::LayerNorm(torch::nn::LayerNormOptions({128})));
    norm_2 = register_module("norm_2", cadre::LayerNorm(torch::nn::LayerNormOptions({128})));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto hidden = x + attention(norm_1(x));
    return hidden + experts(norm_2(hidden)).values;
  }
  cadre::SelfAttention attention{nullptr};
  cadre::MixtureOfExperts experts{nullptr};
  cadre::LayerNorm norm_1{nullptr}, norm_2{nullptr};
};
TORCH_MODULE(ExpertBlock);

int main(int argc, char** argv) {
  const auto world = cadre::init_process_group();
  cookbook::Run run(argc, argv, world, world);
  torch::manual_seed(0);
  const cadre::TransformerEmbedding embedding(cookbook::kSizes);
  torch::nn::Sequential decoder(embedding, ExpertBlock(), ExpertBlock());
  decoder->push_back(cadre::TransformerHead(cookbook::kSizes));
  const cadre::ExpertParallel experts(*decoder, world);
  torch::optim::AdamW optimizer(decoder->parameters(), cookbook::adamw());
  const auto loss_of = [&](const torch::Tensor& tokens, const torch::Tensor& next) {
    const auto mean = cookbook::loss_of(decoder->forward(tokens), next);
    return experts.mean_over_tokens(mean * next.numel(), next.numel());
  };
  run.train([&](const torch::Tensor& tokens, const torch::Tensor& next) {
    optimizer.zero_grad();
    loss_of(tokens, next).backward();
    experts.sum_gradients();
    optimizer.step();
  });
  run.report("expert", loss_of);
}
