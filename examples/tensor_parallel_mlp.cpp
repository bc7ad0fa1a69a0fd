// An MLP whose hidden features are divided among the ranks: cadre run --nproc-per-node 2
// ./tensor_parallel_mlp. It prints the same losses on any number of ranks.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>

struct Mlp : torch::nn::Module {
  Mlp() {
    up = register_module("up", cadre::Linear(torch::nn::LinearOptions(3, 12).bias(false)));
    down = register_module("down", cadre::Linear(torch::nn::LinearOptions(12, 2).bias(false)));
    to(torch::kDouble);
    const torch::NoGradGuard no_grad;
    for (auto& weight : parameters()) {
      weight.copy_(torch::arange(weight.numel(), torch::kDouble).sin().view_as(weight) / 2);
    }
  }
  torch::Tensor forward(const torch::Tensor& x) { return down(up(x).tanh()); }
  cadre::Linear up{nullptr}, down{nullptr};
};

int main() try {
  auto world = cadre::init_process_group();
  const cadre::DeviceMesh mesh(world, {{"tp", world.world_size()}});
  Mlp model;
  // Each rank keeps some rows of the first weight, and the matching columns of the second weight.
  cadre::parallelize_module(
      model, mesh["tp"],
      {{"up", cadre::ParallelStyle::kColwise}, {"down", cadre::ParallelStyle::kRowwise}});
  torch::optim::SGD optimizer(model.parameters(), /*lr=*/0.1);
  // Every rank passes the whole batch.
  const auto x = torch::arange(24, torch::kDouble).sin().view({8, 3}) / 2;
  const auto target = torch::stack({x.sum(1), x.prod(1)}, 1);

  for (int step = 0; step <= 20; ++step) {
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(model.forward(x), target);
    loss.backward();
    optimizer.step();
    if (step % 10 == 0 && world.rank() == 0) {
      std::printf("step %d: loss %.9f\n", step, loss.item<double>());
    }
  }
  mesh.close();
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "tensor_parallel_mlp: " << error.what() << std::endl;
  return 1;
}
