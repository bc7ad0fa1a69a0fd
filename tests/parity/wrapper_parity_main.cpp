// Runs one rank of a training of modules of libtorch under a wrapper, from given weights on given
// rows. wrapper_parity_test.py compares the losses with those of PyTorch.
//
//   cadre_wrapper_parity FOLDER CASE LOSSES
//
// FOLDER has weights.safetensors with the state of the model, and rows.safetensors with "inputs"
// (steps, rows, width) and "targets" (steps, rows). CASE: ddp, zero1, fsdp, bf16, fp16, local_sgd,
// ema or sync_bn.
// Rank 0 writes the loss of each step to the file LOSSES, one on each line.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace {

using torch::Tensor;
namespace nn = torch::nn;

// wrapper_parity_test.py has the same numbers.
constexpr int64_t kNumSteps = 20;
constexpr int64_t kNumRows = 12;
constexpr int64_t kWidth = 16;
constexpr int64_t kStartOfLocalSteps = 6;
constexpr int64_t kAveragingPeriod = 4;
constexpr double kDecay = 0.8;

// Two modules of libtorch in one: a batch normalization and a transformer.
struct NetImpl : nn::Module {
  NetImpl() {
    stem = register_module("stem", nn::Linear(kWidth, kWidth));
    norm = register_module("norm", nn::BatchNorm1d(kWidth));
    const auto layer = nn::TransformerEncoderLayerOptions(kWidth, 2).dim_feedforward(32).dropout(0);
    encoder =
        register_module("encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 2)));
    head = register_module("head", nn::Linear(kWidth, 1));
  }
  // Each row is a sequence of one token.
  Tensor forward(const Tensor& rows) {
    return head(encoder(norm(stem(rows)).unsqueeze(0)).squeeze(0)).squeeze(1);
  }
  nn::Linear stem{nullptr};
  nn::BatchNorm1d norm{nullptr};
  nn::TransformerEncoder encoder{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

struct Rows : nn::Module {
  Rows() {
    inputs = register_buffer("inputs", torch::zeros({kNumSteps, kNumRows, kWidth}));
    targets = register_buffer("targets", torch::zeros({kNumSteps, kNumRows}));
  }
  Tensor inputs, targets;
};

cadre::TrainingOptions options_of(const std::string& name, const cadre::ProcessGroup& world) {
  cadre::TrainingOptions options;
  options.strategy = cadre::parse_data_strategy(name).value_or(cadre::DataStrategy::kDdp);
  if (name == "bf16") options.ddp.comm_hook = cadre::comm_hooks::bf16_compress();
  if (name == "fp16") options.ddp.comm_hook = cadre::comm_hooks::fp16_compress();
  if (name == "local_sgd") {
    options.ddp.comm_hook = cadre::comm_hooks::post_local_sgd(
        {.subgroup = *world.split({.color = world.rank()}), .start_step = kStartOfLocalSteps});
  }
  return options;
}

void train(const cadre::ProcessGroup& world, const std::string& folder, const std::string& name,
           const std::string& path_of_losses) {
  Net net;
  cadre::load(*net, folder + "/weights.safetensors");
  Rows rows;
  cadre::load(rows, folder + "/rows.safetensors");
  if (name == "sync_bn") {
    cadre::convert_sync_batchnorm(*net, world);
  } else {
    net->norm->eval();  // the statistics of a rank's rows would differ from those of the batch
  }
  const auto adamw = torch::optim::AdamWOptions(3e-3).betas({0.9, 0.99}).weight_decay(0.1);
  cadre::Training training{net, adamw, world, options_of(name, world)};
  std::optional<cadre::ModelAverager> averager;
  if (name == "local_sgd") {
    averager.emplace(net, world,
                     cadre::ModelAveragerOptions{
                         .method = cadre::PeriodicAveraging{.period = kAveragingPeriod,
                                                            .warmup_steps = kStartOfLocalSteps}});
  }
  std::optional<cadre::ExponentialMovingAverage> average;
  if (name == "ema") average.emplace(net, cadre::MovingAverageOptions{.decay = kDecay});
  std::ofstream losses;
  if (world.rank() == 0) losses.open(path_of_losses);
  losses.precision(std::numeric_limits<double>::max_digits10);
  for (int64_t step = 0; step < kNumSteps; ++step) {
    const auto own = [&](const Tensor& all) {
      return all[step].chunk(world.world_size())[static_cast<size_t>(world.rank())];
    };
    Tensor loss = torch::mse_loss(training(own(rows.inputs)), own(rows.targets));
    training.backward(loss);
    training.step();
    if (averager) averager->step();
    if (average) {  // the loss of the averaged weights is written
      average->update();
      const auto averaged = average->swap_in();
      const torch::NoGradGuard no_grad;
      loss = torch::mse_loss(net->forward(own(rows.inputs)), own(rows.targets));
    }
    const double mean = training.mean(loss);
    if (losses.is_open()) losses << mean << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4) {
    std::cerr << "usage: cadre_wrapper_parity FOLDER CASE LOSSES\n";
    return 2;
  }
  at::set_num_threads(1);
  auto world = cadre::init_process_group();
  train(world, argv[1], argv[2], argv[3]);
  world.close();
} catch (const cadre::Error& error) {
  std::cerr << "cadre_wrapper_parity: " << error.what() << '\n';
  return 1;
}
