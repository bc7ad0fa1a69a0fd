// Measures one training step with its optimizer (zero_grad, forward, backward, fused AdamW) of a
// model under one of several strategies. Rank 0 prints one line of JSON: the median and the 99th
// percentile of the step, the medians of its parts, its CPU time, and the loss of the last step,
// which must be equal under all strategies. Blocks until done.
//
//   cadre run --nproc-per-node 2 --no-python sharded_step WAY [--form gathered|mapped] [--typed]
//     [--tcp] [--model mlp|gpt] [steps [layers [width [batch]]]]
//   WAY: ddp, zero1, zero2, fsdp, hsdp (each host has the whole model). --form: for fsdp, whether
//   ranks gather copies of the shards or map them in shared memory. --typed: the units are
//   ShardUnits, instead of being found by the operations that use their parameters. --tcp: over
//   loopback TCP instead of shared memory. batch: rows of the MLP, or sequences of 64 tokens of the
//   GPT.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kVocabulary = 256, kContext = 64, kHeadWidth = 64;

struct LayerImpl : nn::Module {
  explicit LayerImpl(int64_t width) : linear(register_module("linear", nn::Linear(width, width))) {}
  Tensor forward(const Tensor& x) { return torch::relu(linear(x)); }
  nn::Linear linear;
};
using Layer = nn::ModuleHolder<LayerImpl>;
using TypedLayer = nn::ModuleHolder<cadre::ShardUnit<LayerImpl>>;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width) {
    norm_1 = register_module("norm_1", nn::LayerNorm(nn::LayerNormOptions({width})));
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    project = register_module("project", nn::Linear(width, width));
    norm_2 = register_module("norm_2", nn::LayerNorm(nn::LayerNormOptions({width})));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
  }
  Tensor forward(const Tensor& x) {
    const int64_t num_heads = std::max<int64_t>(x.size(2) / kHeadWidth, 1);
    const auto heads = qkv(norm_1(x))
                           .view({x.size(0), x.size(1), 3, num_heads, -1})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const Tensor mixed = torch::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0,
                                                             /*is_causal=*/true);
    const Tensor h = x + project(mixed.transpose(1, 2).reshape(x.sizes()));
    return h + down(torch::gelu(up(norm_2(h))));
  }
  nn::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  nn::Linear qkv{nullptr}, project{nullptr}, up{nullptr}, down{nullptr};
};
using Block = nn::ModuleHolder<BlockImpl>;
using TypedBlock = nn::ModuleHolder<cadre::ShardUnit<BlockImpl>>;

struct Settings {
  std::string way;
  std::string model = "mlp";
  cadre::ShardForm form = cadre::ShardForm::kGathered;
  bool has_typed_units = false;
  std::string backend = {};  // the value of InitOptions::backend
  int steps = 20;
  int layers = 6;
  int width = 1024;
  int batch = 64;
};

template <typename Unit>
struct MlpImpl : nn::Module {
  explicit MlpImpl(const Settings& settings) {
    for (int i = 0; i < settings.layers; ++i) {
      units.push_back(register_module("layer_" + std::to_string(i), Unit(settings.width)));
    }
  }
  static Tensor make_input(const Settings& settings) {
    return torch::randn({settings.batch, settings.width});
  }
  Tensor forward(Tensor x) {
    for (Unit& layer : units) x = layer->forward(x);
    return x;
  }
  static Tensor loss_of(const Tensor& output, const Tensor&) { return (output - 1).pow(2).mean(); }
  std::vector<Unit> units;
};

template <typename Unit>
struct GptImpl : nn::Module {
  explicit GptImpl(const Settings& settings) {
    tokens = register_module("tokens", nn::Embedding(kVocabulary, settings.width));
    positions = register_module("positions", nn::Embedding(kContext, settings.width));
    for (int i = 0; i < settings.layers; ++i) {
      units.push_back(register_module("block_" + std::to_string(i), Unit(settings.width)));
    }
    head = register_module("head", nn::Linear(settings.width, kVocabulary));
  }
  static Tensor make_input(const Settings& settings) {
    return torch::randint(kVocabulary, {settings.batch, kContext}, torch::kLong);
  }
  Tensor forward(const Tensor& x) {
    Tensor h = tokens(x) + positions(torch::arange(x.size(1)));
    for (Unit& block : units) h = block->forward(h);
    return head(h);
  }
  static Tensor loss_of(const Tensor& output, const Tensor& x) {
    return nn::functional::cross_entropy(output.reshape({-1, kVocabulary}),
                                         x.roll(-1, 1).reshape({-1}));
  }
  nn::Embedding tokens{nullptr}, positions{nullptr};
  std::vector<Unit> units;
  nn::Linear head{nullptr};
};

// The milliseconds of each step and of its parts (one number for each step), and the loss of the
// last step.
struct Times {
  std::vector<double> steps, forwards, backwards, updates;
  double cpu_ms = 0;  // the CPU time of this rank's process for one step
  double loss = 0;
};

template <typename Net, typename Model, typename Optimizer>
Times train(Model& model, Optimizer& optimizer, const Settings& settings) {
  const Tensor x = Net::ContainedType::make_input(settings);
  constexpr int kWarmUp = 4;
  Times times;
  Tensor loss;
  using Clock = std::chrono::steady_clock;
  const auto spent = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double, std::milli>(to - from).count();
  };
  std::clock_t cpu = 0;
  for (int i = 0; i < settings.steps + kWarmUp; ++i) {
    if (i == kWarmUp) cpu = std::clock();
    const auto start = Clock::now();
    optimizer.zero_grad();
    loss = Net::ContainedType::loss_of(model(x), x);
    const auto forward = Clock::now();
    loss.backward();
    const auto backward = Clock::now();
    optimizer.step();
    const auto end = Clock::now();
    if (i < kWarmUp) continue;
    times.steps.push_back(spent(start, end));
    times.forwards.push_back(spent(start, forward));
    times.backwards.push_back(spent(forward, backward));
    times.updates.push_back(spent(backward, end));
  }
  times.cpu_ms = 1e3 * static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC / settings.steps;
  times.loss = loss.item<double>();
  return times;
}

int ranks_on_this_host() {
  const char* const text = std::getenv("LOCAL_WORLD_SIZE");
  return text == nullptr ? 1 : std::max(std::atoi(text), 1);
}

template <typename Net>
Times run(const cadre::ProcessGroup& world, const Settings& settings) {
  torch::manual_seed(0);
  Net net(settings);
  torch::manual_seed(1 + world.rank());
  const torch::optim::AdamWOptions options(1e-4);
  if (settings.way == "fsdp" || settings.way == "hsdp") {
    const int num_shards = settings.way == "fsdp" ? world.world_size() : ranks_on_this_host();
    const cadre::DeviceMesh mesh(
        world, {{"replicas", world.world_size() / num_shards}, {"shards", num_shards}});
    cadre::FullyShardedDataParallel model{
        net,
        mesh,
        {.form = settings.form, .wrap_policy = cadre::wrap_by_type<LayerImpl, BlockImpl>()}};
    cadre::ShardedOptimizer<cadre::AdamW> optimizer{model, options};
    return train<Net>(model, optimizer, settings);
  }
  const auto placement = settings.way == "zero2" ? cadre::GradientPlacement::kSharded
                                                 : cadre::GradientPlacement::kReplicated;
  cadre::DistributedDataParallel model{net, world, {.gradients = placement}};
  if (settings.way == "ddp") {
    cadre::AdamW optimizer{net->parameters(), options};
    return train<Net>(model, optimizer, settings);
  }
  cadre::ZeroRedundancyOptimizer<cadre::AdamW> optimizer{model, options};
  return train<Net>(model, optimizer, settings);
}

double at_share(std::vector<double> times, double share) {
  std::sort(times.begin(), times.end());
  return times[static_cast<size_t>(static_cast<double>(times.size()) * share)];
}

// Returns false if the arguments are invalid.
bool parse(std::vector<std::string> arguments, Settings& settings) {
  const std::vector<std::string> ways = {"ddp", "zero1", "zero2", "fsdp", "hsdp"};
  if (arguments.empty() || std::ranges::count(ways, arguments[0]) == 0) return false;
  settings.way = arguments[0];
  std::vector<int*> numbers = {&settings.steps, &settings.layers, &settings.width, &settings.batch};
  size_t num_given = 0;
  for (size_t i = 1; i < arguments.size(); ++i) {
    const std::string next = i + 1 < arguments.size() ? arguments[i + 1] : "";
    if (arguments[i] == "--form" && (next == "gathered" || next == "mapped")) {
      settings.form = next == "mapped" ? cadre::ShardForm::kMapped : cadre::ShardForm::kGathered;
      ++i;
    } else if (arguments[i] == "--model" && (next == "mlp" || next == "gpt")) {
      settings.model = next;
      ++i;
    } else if (arguments[i] == "--typed") {
      settings.has_typed_units = true;
    } else if (arguments[i] == "--tcp") {
      settings.backend = "net";
    } else if (num_given < numbers.size()) {
      *numbers[num_given] = std::atoi(arguments[i].c_str());
      if (*numbers[num_given++] <= 0) return false;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  if (!parse({argv + 1, argv + argc}, settings)) {
    std::cerr
        << "usage: sharded_step ddp|zero1|zero2|fsdp|hsdp [--form gathered|mapped] "
           "[--typed] [--tcp] [--model mlp|gpt] [steps [layers [width [batch]]]], numbers above 0"
        << std::endl;
    return 2;
  }
  at::set_num_threads(1);
  const auto world = cadre::init_process_group({.backend = settings.backend});
  const bool is_gpt = settings.model == "gpt";
  const Times times = settings.has_typed_units
                          ? is_gpt ? run<nn::ModuleHolder<GptImpl<TypedBlock>>>(world, settings)
                                   : run<nn::ModuleHolder<MlpImpl<TypedLayer>>>(world, settings)
                      : is_gpt ? run<nn::ModuleHolder<GptImpl<Block>>>(world, settings)
                               : run<nn::ModuleHolder<MlpImpl<Layer>>>(world, settings);
  if (world.rank() == 0) {
    std::cout << "{\"step_ms\": " << at_share(times.steps, 0.5)
              << ", \"step_p99_ms\": " << at_share(times.steps, 0.99)
              << ", \"forward_ms\": " << at_share(times.forwards, 0.5)
              << ", \"backward_ms\": " << at_share(times.backwards, 0.5)
              << ", \"update_ms\": " << at_share(times.updates, 0.5)
              << ", \"cpu_ms\": " << times.cpu_ms << ", \"loss\": " << times.loss << "}"
              << std::endl;
  }
  world.close();
  return 0;
}
