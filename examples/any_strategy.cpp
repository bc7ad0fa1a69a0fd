// Fits y = sin(x) under the strategy of the command line: `cadre run --nproc-per-node 2 --strategy
// fsdp ./any_strategy`, or single, ddp, zero1, zero2, hsdp, tensor, pipeline. The loss stays the
// same.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto world = cadre::init_process_group();
  torch::manual_seed(0);
  torch::nn::Sequential net(cadre::Linear(1, 64), torch::nn::Tanh(), cadre::Linear(64, 64),
                            torch::nn::Tanh(), cadre::Linear(64, 1));
  cadre::TrainingOptions options{.num_parts = 4};  // microbatches
  options.plan = {{"0", cadre::ParallelStyle::kColwise}, {"2", cadre::ParallelStyle::kRowwise}};
  cadre::Training training{net, torch::optim::AdamWOptions(0.01), world, options};
  const auto& rows = training.division().rows();
  const auto loss_of = [](const auto& a, const auto& b) { return torch::mse_loss(a, b); };
  double loss = 0;
  for (int step = 0; step < 100; ++step) {
    const auto batch = torch::rand({48, 1}) * 6.28;  // all ranks draw the same numbers
    const auto x = batch.chunk(rows.world_size())[rows.rank()];
    loss = training.mean(training.step(x, x.sin(), loss_of).loss);
  }
  if (world.rank() == 0) std::cout << training.division().name() << ": loss " << loss << std::endl;
  world.close();
}
