// Fits y = sin(x) under the strategy that the command line names:
// `cadre run --nproc-per-node 2 --strategy fsdp ./any_strategy`. The loss is the same under every
// strategy and on any number of ranks.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  const auto world = cadre::init_process_group();
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64),
                            torch::nn::Tanh(), torch::nn::Linear(64, 1));
  cadre::Training training{net, torch::optim::AdamWOptions(0.01), world};
  double loss = 0;
  for (int step = 0; step < 100; ++step) {
    const auto batch = torch::rand({48, 1}) * 6.28;  // all ranks draw the same numbers
    const auto x = batch.chunk(world.world_size())[world.rank()];
    const auto own_loss = torch::mse_loss(training(x), x.sin());
    training.backward(own_loss);
    training.step();
    loss = training.mean(own_loss);
  }
  const auto name = to_string(training.strategy());
  if (world.rank() == 0) std::cout << name << ", loss " << loss << std::endl;
  world.close();
}
