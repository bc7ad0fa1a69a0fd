// Measures one optimizer step on the parameters of an MLP (float32). Cadre's and torch::optim's
// optimizer alternate on two copies of the parameters, so that a disturbance of the machine affects
// both. Prints one line of JSON: medians, 99th percentiles, the median ratio of neighbouring steps,
// and the machine's limit: the time of an in-place addition, which reads and writes the parameters
// once.
//
//   optimizer_step adamw|adam|sgd [steps [layers [width [threads]]]]
//
// sgd has a momentum of 0.9. The results are compared before they are timed.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using Optimizers =
    std::pair<std::unique_ptr<torch::optim::Optimizer>, std::unique_ptr<torch::optim::Optimizer>>;

std::vector<torch::Tensor> mlp_parameters(int layers, int width) {
  torch::manual_seed(1);
  std::vector<torch::Tensor> parameters;
  for (int i = 0; i < layers; ++i) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{width, width}, {width}}) {
      parameters.push_back((torch::rand(sizes) * 0.02 - 0.01).requires_grad_(true));
      parameters.back().mutable_grad() = torch::randn(sizes) * 1e-3;
    }
  }
  return parameters;
}

template <typename Ours, typename Torchs, typename Options>
Optimizers both(const std::vector<torch::Tensor>& own, const std::vector<torch::Tensor>& truth,
                const Options& options) {
  return {std::make_unique<Ours>(own, options), std::make_unique<Torchs>(truth, options)};
}

// Returns null pointers if the rule is unknown.
Optimizers make_optimizers(const std::string& rule, const std::vector<torch::Tensor>& own,
                           const std::vector<torch::Tensor>& truth) {
  const double rate = 1e-3;
  if (rule == "adamw") {
    return both<cadre::AdamW, torch::optim::AdamW>(own, truth, torch::optim::AdamWOptions(rate));
  }
  if (rule == "adam") {
    return both<cadre::Adam, torch::optim::Adam>(own, truth, torch::optim::AdamOptions(rate));
  }
  if (rule == "sgd") {
    return both<cadre::SGD, torch::optim::SGD>(own, truth,
                                               torch::optim::SGDOptions(rate).momentum(0.9));
  }
  return {};
}

double milliseconds(torch::optim::Optimizer& optimizer) {
  const auto start = std::chrono::steady_clock::now();
  optimizer.step();
  const std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - start;
  return spent.count();
}

double pass_milliseconds(const std::vector<torch::Tensor>& tensors) {
  const torch::NoGradGuard no_grad;
  const auto start = std::chrono::steady_clock::now();
  for (const torch::Tensor& tensor : tensors) tensor.detach().add_(1e-9);
  const std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - start;
  return spent.count();
}

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

// Returns `otherwise` if the argument is missing, and 0 if it is not a positive number.
int argument(int argc, char** argv, int index, int otherwise) {
  return argc > index ? std::max(std::atoi(argv[index]), 0) : otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string rule = argc > 1 ? argv[1] : "";
  const int steps = argument(argc, argv, 2, 10);
  const int layers = argument(argc, argv, 3, 12);
  const int width = argument(argc, argv, 4, 2048);
  const int threads = argument(argc, argv, 5, 1);
  const auto own = mlp_parameters(layers, width);
  const auto truth = mlp_parameters(layers, width);
  const auto [ours, torchs] = make_optimizers(rule, own, truth);
  if (ours == nullptr || std::min({steps, layers, width, threads}) == 0) {
    std::cerr << "usage: optimizer_step adamw|adam|sgd [steps [layers [width [threads]]]], numbers "
                 "above 0"
              << std::endl;
    return 2;
  }
  at::set_num_threads(threads);
  double num_bytes = 0;
  for (int i = 0; i < 2; ++i) ours->step(), torchs->step();
  for (size_t i = 0; i < own.size(); ++i) {
    num_bytes += static_cast<double>(own[i].nbytes());
    if (!torch::allclose(own[i], truth[i], 1e-5, 1e-7)) {
      std::cerr << rule << ": parameter " << i << " differs from torch::optim's" << std::endl;
      return 1;
    }
  }
  std::vector<double> our_ms;
  std::vector<double> torch_ms;
  std::vector<double> pass_ms;
  std::vector<double> ratios;
  for (int i = 0; i < steps; ++i) {
    our_ms.push_back(milliseconds(*ours));
    torch_ms.push_back(milliseconds(*torchs));
    pass_ms.push_back(pass_milliseconds(own));
    ratios.push_back(torch_ms.back() / our_ms.back());
  }
  std::cout << "{\"megabytes\": " << num_bytes / 1e6 << ", \"ours_ms\": " << quantile(our_ms, 0.5)
            << ", \"ours_p99_ms\": " << quantile(our_ms, 0.99)
            << ", \"torch_ms\": " << quantile(torch_ms, 0.5)
            << ", \"torch_p99_ms\": " << quantile(torch_ms, 0.99)
            << ", \"pass_ms\": " << quantile(pass_ms, 0.5)
            << ", \"ratio\": " << quantile(ratios, 0.5) << "}" << std::endl;
  return 0;
}
