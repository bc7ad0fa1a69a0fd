// An MLP whose hidden units are divided among the ranks: cadre run --nproc-per-node 2
// tensor_parallel_mlp. It trains as on one process, and the world size must divide 12.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>

namespace functional = cadre::functional;

// (rows, columns), the same on every rank.
static torch::Tensor weights(int64_t rows, int64_t columns) {
  return torch::arange(rows * columns, torch::kDouble).sin().view({rows, columns}) / 2;
}

int main() try {
  auto world = cadre::init_process_group();
  // This rank's rows of the first weight, and columns of the second.
  auto up = functional::scatter_to_group(weights(12, 3), world, {.dim = 0}).requires_grad_(true);
  auto down = functional::scatter_to_group(weights(2, 12), world, {.dim = 1}).requires_grad_(true);
  torch::optim::SGD optimizer({up, down}, /*lr=*/0.1);
  const auto x = weights(8, 3);  // the whole batch on every rank
  const auto target = torch::stack({x.sum(1), x.prod(1)}, 1);

  for (int step = 0; step <= 20; ++step) {
    optimizer.zero_grad();
    const auto hidden = functional::copy_to_group(x, world).matmul(up.t()).tanh();
    const auto y = functional::reduce_from_group(hidden.matmul(down.t()), world);
    const auto loss = torch::mse_loss(y, target);
    loss.backward();
    optimizer.step();
    if (step % 10 == 0 && world.rank() == 0) {
      std::printf("step %d: loss %.9f\n", step, loss.item<double>());
    }
  }
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "tensor_parallel_mlp: " << error.what() << std::endl;
  return 1;
}
