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
    const nn::LayerNormOptions norm({kWidth});
    const cadre::SelfAttentionOptions heads{.embed_dim = kWidth, .num_heads = 4};
    attention = register_module("attention",
                                nn::Sequential(nn::LayerNorm(norm), cadre::SelfAttention(heads)));
    mlp = register_module("mlp", nn::Sequential(nn::LayerNorm(norm), nn::Linear(kWidth, 4 * kWidth),
                                                nn::GELU(), nn::Linear(4 * kWidth, kWidth)));
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = x + attention->forward(x);
    return h + mlp->forward(h);
  }
  nn::Sequential attention, mlp;
};
using Block = nn::ModuleHolder<cadre::ShardUnit<cadre::ActivationCheckpoint<BlockImpl>>>;

struct Gpt : nn::Module {
  Gpt() {
    tokens = register_module("tokens", nn::Embedding(kVocabulary, kWidth));
    positions = register_module("positions", nn::Embedding(kContext, kWidth));
    for (int i = 0; i < 6; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = blocks->forward(tokens(x) + positions(torch::arange(x.size(1))));
    return torch::matmul(h, tokens->weight.t());
  }
  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::Sequential blocks;
};

int64_t num_elements(const std::vector<Tensor>& tensors) {
  int64_t sum = 0;
  for (const Tensor& tensor : tensors) sum += tensor.numel();
  return sum;
}

int main(int argc, char** argv) {
  auto world = cadre::init_process_group();
  torch::manual_seed(0);
  auto gpt = cadre::defer_init([] { return std::make_shared<Gpt>(); });  // no memory yet
  const int64_t total = num_elements(gpt->parameters());

  cadre::FullyShardedDataParallelOptions options{.wrap_policy = cadre::wrap_by_type<BlockImpl>()};
  if (argc > 1) {
    options.offload = cadre::FileOffload{.folder = argv[1]};
  } else {
    // Ranks of one host read each other's shards in place, without copies.
    options.form = cadre::ShardForm::kMapped;
  }
  cadre::FullyShardedDataParallel model{gpt, world, options};
  cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, torch::optim::AdamWOptions(3e-3)};

  double first = 0, last = 0;
  for (int step = 0; step < 40; ++step) {
    // Sequences that count in steps of one to four; this rank has every world_size-th of twelve.
    const Tensor rows = torch::arange(world.rank(), 12, world.world_size()).unsqueeze(1);
    const Tensor all =
        (rows * 5 + step + torch::arange(kContext + 1) * (rows % 4 + 1)) % kVocabulary;
    optimizer.zero_grad();
    const Tensor logits = model(all.slice(1, 0, kContext)).flatten(0, 1);
    const Tensor loss = nn::functional::cross_entropy(logits, all.slice(1, 1).flatten());
    loss.backward();
    optimizer.step();
    last = model.mean_over_ranks(loss);
    if (step == 0) first = last;
  }
  std::cout << "rank " << world.rank() << ": loss " << first << " to " << last << ", owns "
            << num_elements(model.parameters()) << " of " << total << " elements, gathers at most "
            << model.peak_full_bytes() << " bytes" << std::endl;
  world.close();
}
