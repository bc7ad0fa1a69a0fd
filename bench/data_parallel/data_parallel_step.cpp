// Times training steps of an MLP in one process, with DataParallel, and with
// DistributedDataParallel on ranks of spawn(): data_parallel_step FORM REPLICAS SECONDS. Prints the
// median of the steps in ms.
#include <cadre/ddp.h>
#include <cadre/process_group.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace nn = torch::nn;
using Clock = std::chrono::steady_clock;

static constexpr int64_t kNumRows = 256;
static constexpr int64_t kWidth = 512;

static nn::Sequential make_net() {
  torch::manual_seed(0);
  return nn::Sequential(nn::Linear(kWidth, kWidth), nn::ReLU(), nn::Linear(kWidth, kWidth),
                        nn::ReLU(), nn::Linear(kWidth, kWidth));
}

// `may_stop` says after each step whether the time is over, the same on all ranks.
template <typename Forward>
static void time_steps(const std::vector<at::Tensor>& parameters, int64_t num_rows, bool prints,
                       const Forward& forward, const std::function<bool(double)>& may_stop) {
  torch::optim::SGD optimizer(parameters, 0.01);
  const at::Tensor x = torch::randn({num_rows, kWidth});
  const at::Tensor y = torch::randn({num_rows, kWidth});
  std::vector<double> times_ms;
  const auto began = Clock::now();
  for (double passed = 0; !may_stop(passed);) {
    const auto start = Clock::now();
    optimizer.zero_grad();
    torch::mse_loss(forward(x), y).backward();
    optimizer.step();
    const auto end = Clock::now();
    times_ms.push_back(std::chrono::duration<double, std::milli>(end - start).count());
    passed = std::chrono::duration<double>(end - began).count();
  }
  std::ranges::sort(times_ms);
  if (prints) std::printf("%.4f\n", times_ms[times_ms.size() / 2]);
}

int main(int argc, char** argv) try {
  if (argc != 4) {
    std::fprintf(stderr, "usage: data_parallel_step one|threads|ranks REPLICAS SECONDS\n");
    return 2;
  }
  const std::string form = argv[1];
  const int replicas = std::atoi(argv[2]);
  const double seconds = std::atof(argv[3]);
  const auto alone = [&](double passed) { return passed >= seconds; };
  if (form == "ranks") {
    cadre::spawn(
        [&](const cadre::ProcessGroup& world) {
          cadre::DistributedDataParallel model{make_net(), world};
          const auto together = [&](double passed) {
            const at::Tensor over = torch::full({1}, passed >= seconds ? 1.0F : 0.0F);
            world.broadcast(over);
            return over.item<float>() > 0;
          };
          time_steps(
              model.parameters(), kNumRows / world.world_size(), world.rank() == 0,
              [&](const at::Tensor& x) { return model(x); }, together);
        },
        replicas);
  } else if (form == "threads") {
    nn::Sequential net = make_net();
    cadre::DataParallel model{net, {.num_replicas = replicas}};
    time_steps(
        model.parameters(), kNumRows, true, [&](const at::Tensor& x) { return model(x); }, alone);
  } else {
    nn::Sequential net = make_net();
    time_steps(
        net->parameters(), kNumRows, true, [&](const at::Tensor& x) { return net->forward(x); },
        alone);
  }
  return 0;
} catch (const cadre::Error& error) {
  std::fprintf(stderr, "data_parallel_step: %s\n", error.what());
  return 1;
}
