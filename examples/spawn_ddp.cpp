// Fits y = sin(x) on ranks that the program starts itself: ./spawn_ddp [RANKS] [threads]. Without
// arguments on two ranks that are processes.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

static void train(const cadre::ProcessGroup& world) {
  torch::manual_seed(0);  // threads share the generator, so the samples below do not come from it
  torch::nn::Sequential net(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  cadre::DistributedDataParallel model{net, world};  // broadcasts rank 0's weights
  torch::optim::Adam optimizer{model.parameters(), /*lr=*/0.01};
  const auto all = torch::linspace(0, 6.2832, 120).unsqueeze(1);
  const auto x = all.tensor_split(world.world_size())[world.rank()];  // this rank's share
  double mean = 0;
  for (int step = 0; step < 300; ++step) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(model(x), x.sin());
    loss.backward();  // meanwhile averages the gradients over the ranks
    optimizer.step();
    mean = model.mean_over_ranks(loss);
  }
  std::printf("rank %d of %d: loss %.9f\n", world.rank(), world.world_size(), mean);
}

int main(int argc, char** argv) try {
  cadre::SpawnOptions options;
  if (argc > 2 && std::string_view(argv[2]) == "threads") {
    options.method = cadre::SpawnMethod::kThreads;
  }
  cadre::spawn(train, argc > 1 ? std::atoi(argv[1]) : 2, options);
  return 0;
} catch (const cadre::Error& error) {
  std::fprintf(stderr, "spawn_ddp: %s\n", error.what());
  return 1;
}
