// A small GPT on a mesh of three axes: its layers are stages of a pipeline along "pp", the batch is
// divided along "dp", and the matrices of each layer along "tp": cadre run --nproc-per-node 8
// ./gpt_3d. It trains as on one process, and also runs on 1, 2 or 4 ranks.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>

constexpr cadre::TransformerOptions kGpt{
    .vocabulary = 17, .context = 16, .embed_dim = 32, .num_heads = 4, .num_blocks = 2};
constexpr int64_t kRows = 8;

// Returns the whole model, with equal weights on all ranks. The head is tied to the embedding.
torch::nn::Sequential make_gpt() {
  torch::manual_seed(0);
  const cadre::TransformerEmbedding embedding(kGpt);
  torch::nn::Sequential gpt(embedding);
  for (int i = 0; i < kGpt.num_blocks; ++i) gpt->push_back(cadre::TransformerBlock(kGpt));
  gpt->push_back(cadre::TransformerHead(embedding));
  return gpt;
}

int main() try {
  auto world = cadre::init_process_group();
  const int pp = world.world_size() >= 2 ? 2 : 1, tp = world.world_size() >= 4 ? 2 : 1;
  const int dp = world.world_size() / pp / tp;
  const cadre::DeviceMesh mesh(world, {{"pp", pp}, {"dp", dp}, {"tp", tp}});
  auto gpt = make_gpt();
  cadre::parallelize_module(*gpt, mesh["tp"], cadre::tensor_parallel_plan(*gpt));
  auto pipeline =
      cadre::pipeline_of(*gpt, mesh["pp"], {.num_microbatches = 2, .replicas = mesh["dp"]});
  torch::optim::AdamW optimizer(pipeline.parameters(), torch::optim::AdamWOptions(1e-2));
  const auto loss_function = [&](const torch::Tensor& logits, const torch::Tensor& targets) {
    return cadre::vocab_parallel_cross_entropy(logits, targets, mesh.group("tp"),
                                               {.vocabulary = kGpt.vocabulary});
  };
  // Ranks with different coordinates along "dp" have different rows of the batch; the others have
  // the same rows.
  const cadre::DataRanks data = cadre::data_ranks(mesh);
  for (int step = 0; step <= 20; ++step) {
    // Training data: sequences that count up in steps of one to four.
    const auto rows = torch::arange(data.rank, kRows, data.size).unsqueeze(1);
    const auto all =
        (rows * 5 + step + torch::arange(kGpt.context + 1) * (rows % 4 + 1)) % kGpt.vocabulary;
    optimizer.zero_grad();
    const auto result = pipeline.step(all.slice(1, 0, kGpt.context), all.slice(1, 1), loss_function,
                                      {.broadcast_losses = true});
    // The norm is that of the whole model's gradient.
    const double norm = cadre::clip_grad_norm_(pipeline, 1.0);
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
