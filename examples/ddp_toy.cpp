// Fits y = sin(x) on any number of processes: `cadre run --nproc-per-node 2 ./ddp_toy`. Without the
// launcher it trains in a single process.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  auto world = cadre::init_process_group();
  torch::manual_seed(world.rank());  // different weights and samples on each rank
  torch::nn::Sequential net(torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  cadre::DistributedDataParallel model{net, world};  // broadcasts rank 0's weights
  torch::optim::Adam optimizer{model->parameters(), /*lr=*/0.01};
  float loss_value = 0;
  for (int step = 0; step < 300; ++step) {
    auto x = torch::rand({64, 1}) * 6.2832f;
    optimizer.zero_grad();
    auto loss = torch::mse_loss(model(x), x.sin());
    loss.backward();  // meanwhile averages the gradients over the ranks
    optimizer.step();
    loss_value = loss.item<float>();
  }
  std::cout << "rank " << world.rank() << " of " << world.world_size() << ": loss " << loss_value
            << ", weights " << model->parameters()[0].abs().sum().item<double>() << std::endl;
  world.close();
  return loss_value < 0.05f ? 0 : 1;
}
