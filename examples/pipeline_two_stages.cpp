// An MLP as a pipeline of two stages: cadre run --nproc-per-node 2 ./pipeline_two_stages. It prints
// the same losses as on one rank, which then has both stages.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <cstdio>
#include <iostream>
#include <memory>
#include <vector>

// Stage 0 computes h = tanh(x up^T), stage 1 computes h down^T.
struct Half : torch::nn::Module {
  explicit Half(int number) : stage(number) {
    const auto sizes = stage == 0 ? std::vector<int64_t>{12, 3} : std::vector<int64_t>{2, 12};
    const auto values = torch::arange(sizes[0] * sizes[1], torch::kDouble).sin() / 2;
    weight = register_parameter("weight", values.view(sizes).clone());
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = torch::linear(x, weight);
    return stage == 0 ? y.tanh() : y;
  }
  int stage;
  torch::Tensor weight;
};

int main() try {
  auto world = cadre::init_process_group();
  std::vector<cadre::PipelineStage> stages;
  std::vector<torch::Tensor> parameters;
  for (int stage = world.rank(); stage < 2; stage += world.world_size()) {
    auto half = std::make_shared<Half>(stage);
    stages.emplace_back(half, cadre::PipelineStageOptions{.stage = stage, .num_stages = 2});
    parameters.push_back(half->weight);
  }
  // The schedule "1f1b" needs exactly one stage on each rank.
  const char* const schedule = world.world_size() == 1 ? "interleaved-1f1b" : "1f1b";
  cadre::Pipeline pipeline(stages, world, {.schedule = schedule, .num_microbatches = 4});
  torch::optim::SGD optimizer(parameters, /*lr=*/0.1);
  // Every rank passes the whole batch.
  const auto x = torch::arange(24, torch::kDouble).sin().view({8, 3}) / 2;
  const auto target = torch::stack({x.sum(1), x.prod(1)}, 1);
  const auto loss_function = [](const torch::Tensor& output, const torch::Tensor& expected) {
    return torch::mse_loss(output, expected);
  };

  for (int step = 0; step <= 20; ++step) {
    optimizer.zero_grad();
    const auto result = pipeline.step(x, target, loss_function, {.broadcast_losses = true});
    optimizer.step();
    if (step % 10 == 0 && world.rank() == 0) {
      std::printf("step %d: loss %.9f\n", step, result.loss.item<double>());
    }
  }
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "pipeline_two_stages: " << error.what() << std::endl;
  return 1;
}
