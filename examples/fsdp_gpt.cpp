// Trains a small transformer whose blocks are sharded over any number of processes: `cadre run
// --nproc-per-node 2 ./fsdp_gpt [FOLDER]`. Each rank owns its share of every block, and gathers a
// block while it computes with it; backward recomputes the activations of blocks. With a FOLDER on
// a disk, the rank keeps its shards in a file there, so that the model may be larger than memory.
// No rank ever holds the whole model: the wrapper initializes the parameters block by block.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <iostream>

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kVocabulary = 17, kContext = 16, kWidth = 32;

struct BlockImpl : nn::Module {
  BlockImpl() {
    norm_1 = register_module("norm_1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
    project = register_module("project", nn::Linear(kWidth, kWidth));
    norm_2 = register_module("norm_2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", nn::Linear(4 * kWidth, kWidth));
  }
  Tensor forward(const Tensor& x) {
    const auto parts = qkv(norm_1(x)).chunk(3, -1);
    const Tensor h = x + project(torch::scaled_dot_product_attention(parts[0], parts[1], parts[2],
                                                                     {}, 0.0, /*is_causal=*/true));
    return h + down(torch::gelu(up(norm_2(h))));
  }
  nn::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  nn::Linear qkv{nullptr}, project{nullptr}, up{nullptr}, down{nullptr};
};
using Block = nn::ModuleHolder<cadre::ShardUnit<cadre::ActivationCheckpoint<BlockImpl>>>;

struct Gpt : nn::Module {
  Gpt() {
    tokens = register_module("tokens", nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", nn::Embedding(kContext, kWidth));
    for (int i = 0; i < 6; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor h = tokens(x) + positions(torch::arange(x.size(1)));
    for (auto& block : blocks) h = block(h);
    return torch::matmul(h, tokens->weight.t());
  }
  nn::Embedding tokens{nullptr}, positions{nullptr};
  std::vector<Block> blocks;
};

int main(int argc, char** argv) {
  auto world = cadre::init_process_group();
  torch::manual_seed(0);
  auto gpt = cadre::defer_init([] { return std::make_shared<Gpt>(); });  // no memory yet
  int64_t num_elements = 0;
  for (const Tensor& parameter : gpt->parameters()) num_elements += parameter.numel();

  for (auto& block : gpt->blocks) cadre::fully_shard(block);
  cadre::FullyShardedDataParallelOptions options;
  if (argc > 1) {
    options.offload = cadre::FileOffload{.folder = argv[1]};
  } else {
    // Ranks of one host read each other's shards in place, without copies.
    options.form = cadre::ShardForm::kMapped;
  }
  cadre::FullyShardedDataParallel model{gpt, world, options};
  cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, torch::optim::AdamWOptions(3e-3)};
  int64_t num_owned = 0;
  for (const Tensor& values : model.parameters()) num_owned += values.numel();

  double first = 0, last = 0;
  for (int step = 0; step < 40; ++step) {
    // Sequences that count in steps of one to four; this rank trains on every world_size-th of
    // them.
    const Tensor all = (torch::arange(12).unsqueeze(1) * 5 + step +
                        torch::arange(kContext + 1) * (torch::arange(12) % 4 + 1).unsqueeze(1)) %
                       kVocabulary;
    const Tensor mine = all.slice(0, world.rank(), 12, world.world_size());
    optimizer.zero_grad();
    const Tensor logits = model(mine.slice(1, 0, kContext));
    const Tensor loss = nn::functional::cross_entropy(logits.reshape({-1, kVocabulary}),
                                                      mine.slice(1, 1).reshape({-1}));
    loss.backward();
    optimizer.step();
    last = model.mean_over_ranks(loss);
    if (step == 0) first = last;
  }
  std::cout << "rank " << world.rank() << ": loss " << first << " to " << last << ", owns "
            << num_owned << " of " << num_elements << " elements, gathers at most "
            << model.peak_full_bytes() << " bytes" << std::endl;
  world.close();
  return 0;
}
