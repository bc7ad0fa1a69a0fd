// Fits y = sin(x) with replicas of one module in threads of one process: ./data_parallel
// [REPLICAS]. With GPUs the replicas are on the devices that DataParallelOptions::devices names.
#include <cadre/ddp.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) try {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  cadre::DataParallel model{net, {.num_replicas = argc > 1 ? std::atoi(argv[1]) : 2}};
  torch::optim::Adam optimizer{model.parameters(), /*lr=*/0.01};
  const auto x = torch::linspace(0, 6.2832, 121).unsqueeze(1);
  double loss_value = 0;
  for (int step = 0; step < 300; ++step) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(model(x), x.sin());  // each replica computes some of the rows
    loss.backward();                                 // adds the gradients of all replicas
    optimizer.step();
    loss_value = loss.item<double>();
  }
  std::printf("%zu replicas: loss %.9f\n", model.devices().size(), loss_value);
  return 0;
} catch (const cadre::Error& error) {
  std::fprintf(stderr, "data_parallel: %s\n", error.what());
  return 1;
}
