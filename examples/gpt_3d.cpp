// A small GPT on a mesh of three axes: its layers are stages of a pipeline along "pp", the batch is
// divided along "dp", and the matrices of each layer along "tp": cadre run --nproc-per-node 8
// ./gpt_3d. It trains as on one process, and also runs on 1, 2 or 4 ranks.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <memory>

namespace nn = torch::nn;
using torch::Tensor;
using enum cadre::ParallelStyle;

constexpr int64_t kVocabulary = 17, kTokens = 16, kWidth = 32, kRows = 8;

struct BlockImpl : nn::Module {
  BlockImpl() {
    norm_1 = register_module("norm_1", cadre::LayerNorm(nn::LayerNormOptions({kWidth})));
    attention = register_module("attention", cadre::SelfAttention(cadre::SelfAttentionOptions{
                                                 .embed_dim = kWidth, .num_heads = 4}));
    norm_2 = register_module("norm_2", cadre::LayerNorm(nn::LayerNormOptions({kWidth})));
    up = register_module("up", cadre::Linear(kWidth, 4 * kWidth));
    down = register_module("down", cadre::Linear(4 * kWidth, kWidth));
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = x + attention(norm_1(x));
    return h + down(torch::gelu(up(norm_2(h))));
  }
  cadre::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  cadre::SelfAttention attention{nullptr};
  cadre::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

// Stage 0 has the embeddings and a block, stage 1 the other block and the head, whose weight is
// that of the embedding. A single stage has all of it.
struct Part : nn::Module {
  Part(int stage, int num_stages) : is_first(stage == 0), is_last(stage == num_stages - 1) {
    tokens = register_module("tokens", cadre::Embedding(kVocabulary, kWidth));
    if (is_first) positions = register_module("positions", cadre::Embedding(kTokens, kWidth));
    if (is_first) block_0 = register_module("block_0", Block());
    if (is_last) block_1 = register_module("block_1", Block());
    const torch::NoGradGuard no_grad;  // the same values on any number of ranks
    for (auto& item : named_parameters()) {
      Tensor& weight = item.value();
      if (weight.dim() > 1) weight.copy_(torch::arange(weight.numel()).sin().view_as(weight) / 8);
      if (item.key().ends_with("bias")) weight.zero_();
    }
  }
  Tensor forward(Tensor x) {
    if (is_first) x = block_0(tokens(x) + positions(torch::arange(kTokens)));
    return is_last ? tokens->logits(block_1(x)) : x;
  }
  bool is_first, is_last;
  cadre::Embedding tokens{nullptr}, positions{nullptr};
  Block block_0{nullptr}, block_1{nullptr};
};

int main() try {
  auto world = cadre::init_process_group();
  const int pp = world.world_size() >= 2 ? 2 : 1, tp = world.world_size() >= 4 ? 2 : 1;
  const cadre::DeviceMesh mesh(world,
                               {{"pp", pp}, {"dp", world.world_size() / pp / tp}, {"tp", tp}});
  const int stage = mesh.coordinate("pp");
  auto part = std::make_shared<Part>(stage, pp);
  cadre::parallelize_module(*part, mesh["tp"],
                            {{"tokens", kRowwise},
                             {"*.attention.qkv", kColwise},
                             {"*.attention.output", kRowwise},
                             {"*.up", kColwise},
                             {"*.down", kRowwise}});
  cadre::Pipeline pipeline({{part, {.stage = stage, .num_stages = pp}}}, mesh["pp"],
                           {.num_microbatches = 2, .replicas = mesh["dp"]});
  if (pp > 1) pipeline.tie_parameters({{0, "tokens.weight"}, {1, "tokens.weight"}});
  torch::optim::AdamW optimizer(pipeline.parameters(), torch::optim::AdamWOptions(1e-2));
  const auto loss_function = [&](const Tensor& logits, const Tensor& targets) {
    return cadre::vocab_parallel_cross_entropy(logits, targets, mesh.group("tp"),
                                               {.vocabulary = kVocabulary});
  };
  // Ranks that differ along "dp" have different rows of the batch, the others the same.
  const cadre::DataRanks data = cadre::data_ranks(mesh);
  for (int step = 0; step <= 20; ++step) {
    // Sequences that count in steps of one to four.
    const auto rows = torch::arange(kRows).unsqueeze(1).slice(0, data.rank, kRows, data.size);
    const auto all = (rows * 5 + step + torch::arange(kTokens + 1) * (rows % 4 + 1)) % kVocabulary;
    optimizer.zero_grad();
    const auto result = pipeline.step(all.slice(1, 0, kTokens), all.slice(1, 1), loss_function,
                                      {.broadcast_losses = true});
    const double norm = cadre::clip_grad_norm_(pipeline, 1.0);  // norm of the whole model
    optimizer.step();
    const auto loss = data.mean(result.loss);
    if (step % 10 == 0 && world.rank() == 0) {
      std::printf("step %d: loss %.3f, norm %.3f\n", step, loss.item<double>(), norm);
    }
  }
  mesh.close();
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "gpt_3d: " << error.what() << std::endl;
  return 1;
}
