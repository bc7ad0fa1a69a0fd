// The time of one training step with its optimizer (zero_grad, forward, backward, fused AdamW) of a
// model that the ranks hold in one of several ways. Rank 0 prints the median and the 99th
// percentile as one line of JSON, with the loss of the last step, which all ways have in common.
// Blocks until done.
//
//   cadre run --nproc-per-node 2 --no-python sharded_step WAY [steps [layers [width [batch]]]]
//   WAY: ddp, zero1, zero2, fsdp
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace {

using torch::Tensor;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t width)
      : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  Tensor forward(const Tensor& x) { return torch::relu(linear(x)); }
  torch::nn::Linear linear;
};
using Layer = torch::nn::ModuleHolder<cadre::ShardUnit<LayerImpl>>;

struct MlpImpl : torch::nn::Module {
  MlpImpl(int num_layers, int64_t width) {
    for (int i = 0; i < num_layers; ++i) {
      layers.push_back(register_module("layer_" + std::to_string(i), Layer(width)));
    }
  }
  Tensor forward(Tensor x) {
    for (Layer& layer : layers) x = layer->forward(x);
    return x;
  }
  std::vector<Layer> layers;
};
TORCH_MODULE(Mlp);

struct Settings {
  std::string way;
  int steps;
  int layers;
  int width;
  int batch;
};

// Returns the milliseconds of each step, and the loss of the last one.
template <typename Model, typename Optimizer>
std::pair<std::vector<double>, double> train(Model& model, Optimizer& optimizer,
                                             const Settings& settings) {
  const Tensor x = torch::randn({settings.batch, settings.width});
  constexpr int kWarmUp = 4;
  std::vector<double> times;
  Tensor loss;
  for (int i = 0; i < settings.steps + kWarmUp; ++i) {
    const auto start = std::chrono::steady_clock::now();
    optimizer.zero_grad();
    loss = (model(x) - 1).pow(2).mean();
    loss.backward();
    optimizer.step();
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - start;
    if (i >= kWarmUp) times.push_back(spent.count());
  }
  return {times, loss.item<double>()};
}

std::pair<std::vector<double>, double> run(const cadre::ProcessGroup& world,
                                           const Settings& settings) {
  torch::manual_seed(0);
  Mlp net(settings.layers, settings.width);
  torch::manual_seed(1 + world.rank());
  const torch::optim::AdamWOptions options(1e-4);
  if (settings.way == "fsdp") {
    for (const Layer& layer : net->layers) cadre::fully_shard(layer);
    cadre::FullyShardedDataParallel model{net, world};
    cadre::AdamW optimizer{model.parameters(), options};
    return train(model, optimizer, settings);
  }
  const auto placement = settings.way == "zero2" ? cadre::GradientPlacement::kSharded
                                                 : cadre::GradientPlacement::kReplicated;
  cadre::DistributedDataParallel model{net, world, {.gradients = placement}};
  if (settings.way == "ddp") {
    cadre::AdamW optimizer{net->parameters(), options};
    return train(model, optimizer, settings);
  }
  cadre::ZeroRedundancyOptimizer<cadre::AdamW> optimizer{model, options};
  return train(model, optimizer, settings);
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int index, int otherwise) {
    return argc > index ? std::max(std::atoi(argv[index]), 0) : otherwise;
  };
  const Settings settings = {.way = argc > 1 ? argv[1] : "",
                             .steps = number(2, 20),
                             .layers = number(3, 6),
                             .width = number(4, 1024),
                             .batch = number(5, 64)};
  const std::vector<std::string> ways = {"ddp", "zero1", "zero2", "fsdp"};
  if (std::find(ways.begin(), ways.end(), settings.way) == ways.end() || argc > 6 ||
      std::min({settings.steps, settings.layers, settings.width, settings.batch}) == 0) {
    std::cerr << "usage: sharded_step ddp|zero1|zero2|fsdp [steps [layers [width [batch]]]], "
                 "numbers above 0"
              << std::endl;
    return 2;
  }
  at::set_num_threads(1);
  const auto world = cadre::init_process_group();
  auto [times, loss] = run(world, settings);
  std::sort(times.begin(), times.end());
  if (world.rank() == 0) {
    std::cout << "{\"step_ms\": " << times[times.size() / 2]
              << ", \"step_p99_ms\": " << times[times.size() * 99 / 100] << ", \"loss\": " << loss
              << "}" << std::endl;
  }
  world.close();
  return 0;
}
