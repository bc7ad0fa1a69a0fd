// Trains a small transformer whose blocks are sharded over any number of processes:
//   cadre run --nproc-per-node 2 ./fsdp_gpt [FOLDER]
// Each rank owns a shard of every block, and gathers a block while it computes with it; backward
// recomputes the activations of blocks. With a FOLDER on a disk, each rank keeps its shards in a
// file there, so that the model may be larger than memory. No rank ever holds the whole model: the
// wrapper initializes the parameters block by block.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <iostream>

namespace nn = torch::nn;

constexpr cadre::TransformerOptions kGpt{.vocabulary = 17,
                                         .context = 16,
                                         .embed_dim = 32,
                                         .num_heads = 4,
                                         .num_blocks = 6,
                                         .recompute = true};

nn::Sequential make_gpt() {
  const cadre::TransformerEmbedding embedding(kGpt);
  nn::Sequential gpt(embedding);
  for (int i = 0; i < kGpt.num_blocks; ++i) gpt->push_back(cadre::TransformerBlock(kGpt));
  gpt->push_back(cadre::TransformerHead(embedding));
  return gpt;
}

int main(int argc, char** argv) {
  auto world = cadre::init_process_group();
  torch::manual_seed(0);
  const auto gpt = cadre::defer_init(make_gpt);  // allocates no memory for the parameters yet
  const int64_t total = cadre::num_elements(gpt->parameters());
  // Ranks of one host read each other's shards in place, without copies.
  cadre::FullyShardedDataParallelOptions options{.form = cadre::ShardForm::kMapped};
  if (argc > 1) options = {.offload = cadre::FileOffload{.folder = argv[1]}};
  options.wrap_policy = cadre::wrap_by_type<cadre::TransformerBlockImpl>();
  cadre::FullyShardedDataParallel model{gpt, world, options};
  cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, torch::optim::AdamWOptions(3e-3)};

  double first = 0, last = 0;
  for (int step = 0; step < 40; ++step) {
    // Training data: twelve sequences that count up in steps of one to four. This rank trains on
    // every world_size-th of them.
    const auto rows = torch::arange(world.rank(), 12, world.world_size()).unsqueeze(1);
    const auto all =
        (rows * 5 + step + torch::arange(kGpt.context + 1) * (rows % 4 + 1)) % kGpt.vocabulary;
    optimizer.zero_grad();
    const auto logits = model(all.slice(1, 0, kGpt.context)).flatten(0, 1);
    const auto loss = nn::functional::cross_entropy(logits, all.slice(1, 1).flatten());
    loss.backward();
    optimizer.step();
    last = model.mean_over_ranks(loss);
    if (step == 0) first = last;
  }
  std::cout << "rank " << world.rank() << ": loss " << first << " to " << last << ", owns "
            << cadre::num_elements(model.parameters()) << " of " << total
            << " elements, gathers at most " << model.peak_full_bytes() << " bytes" << std::endl;
  world.close();
}
