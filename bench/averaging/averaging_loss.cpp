// Trains a small model with each method of averaging on the ranks of `cadre run`, and prints the
// loss on held-out data and the bytes that rank 0 has sent. bench/averaging/run calls it.
//
//   averaging_loss METHOD TASK DATA STEPS
//
// METHOD: ddp, periodic, hierarchical, post_local_sgd, diloco, diloco8, gossip or gossip_exp.
// TASK: shakespeare, DATA is the text; or mnist, DATA is the folder. Both hold the last tenth back.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace {

using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kPeriod = 16;
constexpr int64_t kWarmup = 32;
constexpr int64_t kContext = 32;
constexpr int64_t kBatch = 16;  // samples of a rank in a step
constexpr int64_t kHeldOut = 2048;
constexpr double kLearningRate = 2e-3;

struct Samples {
  Tensor inputs, targets;
};

// Gives samples by a generator, and those that are held out.
struct Task {
  std::function<Samples(at::Generator&)> draw;
  Samples held_out;
};

// An embedding, a GRU and a head for text; two layers for images.
struct ModelImpl : nn::Module {
  ModelImpl(bool is_text, int64_t num_classes) {
    if (is_text) {
      embedding = register_module("embedding", nn::Embedding(num_classes, 64));
      recurrent = register_module("recurrent", nn::GRU(nn::GRUOptions(64, 128).batch_first(true)));
      head = register_module("head", nn::Linear(128, num_classes));
    } else {
      hidden = register_module("hidden", nn::Linear(784, 128));
      head = register_module("head", nn::Linear(128, num_classes));
    }
  }
  Tensor forward(const Tensor& x) {
    if (embedding.is_empty()) return head(torch::relu(hidden(x.flatten(1))));
    return head(std::get<0>(recurrent(embedding(x)))).flatten(0, 1);
  }
  nn::Embedding embedding{nullptr};
  nn::GRU recurrent{nullptr};
  nn::Linear hidden{nullptr}, head{nullptr};
};
TORCH_MODULE(Model);

Task shakespeare(const std::string& path, int64_t& num_classes) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (text.size() < 100000) throw std::runtime_error("no text of 100 kB in " + path);
  Tensor bytes = torch::empty({static_cast<int64_t>(text.size())}, torch::kByte);
  std::copy(text.begin(), text.end(), reinterpret_cast<char*>(bytes.data_ptr()));
  const auto [letters, tokens] = torch::_unique(bytes, /*sorted=*/true, /*return_inverse=*/true);
  num_classes = letters.size(0);
  const int64_t num_trained = tokens.size(0) / 10 * 9;
  const auto windows = [tokens = tokens](const Tensor& begins) {
    const Tensor places = begins.unsqueeze(1) + torch::arange(kContext + 1);
    const Tensor rows = tokens.index({places});
    return Samples{rows.slice(1, 0, kContext), rows.slice(1, 1).flatten()};
  };
  const int64_t distance = (tokens.size(0) - num_trained - kContext - 1) / (kHeldOut / 4);
  return {.draw =
              [=](at::Generator& generator) {
                return windows(torch::randint(num_trained - kContext - 1, {kBatch}, generator));
              },
          .held_out = windows(torch::arange(kHeldOut / 4) * distance + num_trained)};
}

Task mnist(const std::string& folder, int64_t& num_classes) {
  num_classes = 10;
  const auto part =
      cadre::Mnist::has(folder, cadre::kMnistTrain) ? cadre::kMnistTrain : cadre::kMnistTest;
  const auto images = std::make_shared<cadre::Mnist>(folder, part);
  const int64_t num_trained = images->size() / 10 * 9;
  const auto get = [images](const Tensor& numbers) {
    const Tensor indices = numbers.contiguous();
    const cadre::Batch batch =
        images->get({indices.data_ptr<int64_t>(), static_cast<size_t>(indices.numel())});
    return Samples{batch.data, batch.target};
  };
  return {.draw =
              [=](at::Generator& generator) {
                return get(torch::randint(num_trained, {kBatch}, generator));
              },
          .held_out = get(torch::arange(num_trained, images->size()))};
}

std::optional<cadre::AveragingMethod> method_of(const std::string& name, int num_ranks) {
  if (name == "periodic") return cadre::PeriodicAveraging{.period = kPeriod};
  if (name == "post_local_sgd") {
    return cadre::PeriodicAveraging{.period = kPeriod, .warmup_steps = kWarmup};
  }
  if (name == "hierarchical") {
    return cadre::HierarchicalAveraging{
        .levels = {{.period = kPeriod / 4, .group_size = num_ranks / 2},
                   {.period = kPeriod, .group_size = num_ranks}}};
  }
  if (name == "diloco") return cadre::DiLoCo{.period = kPeriod};
  if (name == "diloco8") {
    return cadre::DiLoCo{.period = kPeriod, .exchange = cadre::comm_hooks::quantize_per_tensor()};
  }
  if (name == "gossip") return cadre::Gossip{.period = kPeriod / 4};
  if (name == "gossip_exp") {
    return cadre::Gossip{.graph = cadre::GossipGraph::kExponential, .period = kPeriod / 4};
  }
  if (name == "ddp") return std::nullopt;
  throw std::runtime_error("unknown method " + name);
}

// Returns the bytes of the model that rank 0 gives to the group, by the formulas that the tests
// ModelAverager.TheBytesSentAreThoseOfTheFormula and CommHooks.TheBytesSentAreThoseOfTheirFormulas
// count.
double bytes_sent(const std::string& name, int64_t num_elements, int64_t num_exchanges,
                  int64_t num_steps) {
  const double model = 4.0 * static_cast<double>(num_elements);
  if (name == "ddp") return model * static_cast<double>(num_steps);
  const double warmup = name == "post_local_sgd" ? static_cast<double>(kWarmup) : 0.0;
  const double part = name == "diloco8" ? 0.25 : 1.0;
  return model * (warmup + part * static_cast<double>(num_exchanges));
}

template <typename Forward>
void train(Forward& model, const Task& task, const cadre::ProcessGroup& world,
           torch::optim::Optimizer& optimizer, const std::function<void()>& after_step,
           int64_t num_steps) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + world.rank());
  for (int64_t step = 0; step < num_steps; ++step) {
    const Samples samples = task.draw(generator);
    optimizer.zero_grad();
    nn::functional::cross_entropy(model(samples.inputs), samples.targets).backward();
    optimizer.step();
    after_step();
  }
}

void run(const cadre::ProcessGroup& world, const std::string& name, const std::string& data,
         bool is_text, int64_t num_steps) {
  int64_t num_classes = 0;
  const Task task = is_text ? shakespeare(data, num_classes) : mnist(data, num_classes);
  torch::manual_seed(1);
  Model model(is_text, num_classes);
  std::optional<cadre::ModelAverager> averager;
  if (const auto method = method_of(name, world.world_size())) {
    averager.emplace(model, world, cadre::ModelAveragerOptions{.method = *method});
  }
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(kLearningRate));
  int64_t num_exchanges = 0;
  const auto after_step = [&] {
    if (averager && averager->step()) ++num_exchanges;
  };
  if (name == "ddp" || name == "post_local_sgd") {
    cadre::DistributedDataParallelOptions options;
    if (name != "ddp") {
      options.comm_hook = cadre::comm_hooks::post_local_sgd(
          {.subgroup = *world.split({.color = world.rank()}), .start_step = kWarmup});
    }
    cadre::DistributedDataParallel wrapped{model, world, options};
    train(wrapped, task, world, optimizer, after_step, num_steps);
  } else {
    train(model, task, world, optimizer, after_step, num_steps);
  }
  if (averager && !averager->is_synchronized()) {
    averager->synchronize();
    ++num_exchanges;
  }
  const torch::NoGradGuard no_grad;
  const double loss =
      nn::functional::cross_entropy(model->forward(task.held_out.inputs), task.held_out.targets)
          .item<double>();
  const int64_t num_elements = cadre::num_elements(model->parameters());
  if (world.rank() != 0) return;
  std::cout << name << " " << loss << " "
            << bytes_sent(name, num_elements, num_exchanges, num_steps) << " " << num_elements
            << std::endl;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 5) {
    std::cerr << "usage: averaging_loss METHOD shakespeare|mnist DATA STEPS\n";
    return 2;
  }
  at::set_num_threads(1);
  const auto world = cadre::init_process_group();
  run(world, argv[1], argv[3], std::string(argv[2]) == "shakespeare", std::atoll(argv[4]));
  world.close();
} catch (const std::exception& error) {
  std::cerr << "averaging_loss: " << error.what() << '\n';
  return 1;
}
