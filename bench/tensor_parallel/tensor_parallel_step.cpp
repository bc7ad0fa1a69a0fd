// Measures tensor parallelism: a step of a transformer block that is divided among the ranks, or
// the overhead of its layers in addition to their arithmetic. Rank 0 prints medians as one line of
// JSON. Blocks until done.
//
//   cadre run --nproc-per-node 2 --no-python tensor_parallel_step block [--sequence]
//     [steps [width [tokens]]]
//   cadre run --nproc-per-node 2 --no-python tensor_parallel_step overhead [--sequence]
//     [iterations [width [tokens]]]
//
// block: zero_grad, forward and backward of norm, attention, norm and MLP on sequences of at most
// 1024 tokens, whose gradient is computed, too. Prints the loss and the norm of all gradients,
// which must equal those of torch_block.py. overhead: forward and backward of a column-parallel and
// a row-parallel layer, without biases. Also measures separately: their six matrix products, their
// collectives, both in the order of the layers, and two undivided layers of the sizes that one rank
// has. --sequence: with sequence parallelism.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

namespace {

namespace nn = torch::nn;
using cadre::ParallelStyle;
using torch::Tensor;
using Clock = std::chrono::steady_clock;

constexpr int64_t kMaxSequence = 1024, kHeadWidth = 64;

struct Settings {
  bool is_block = true;
  bool is_sequence_parallel = false;
  int repeats = 10;
  int width = 512;
  int tokens = 1024;
};

double milliseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

double at_share(std::vector<double> times, double share) {
  std::sort(times.begin(), times.end());
  return times[static_cast<size_t>(static_cast<double>(times.size()) * share)];
}

struct Block : nn::Module {
  explicit Block(int64_t width) {
    norm_1 = register_module("norm_1", cadre::LayerNorm(nn::LayerNormOptions({width})));
    attention = register_module(
        "attention",
        cadre::SelfAttention(cadre::SelfAttentionOptions{
            .embed_dim = width, .num_heads = std::max<int64_t>(width / kHeadWidth, 2)}));
    norm_2 = register_module("norm_2", cadre::LayerNorm(nn::LayerNormOptions({width})));
    up = register_module("up", cadre::Linear(width, 4 * width));
    down = register_module("down", cadre::Linear(4 * width, width));
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = x + attention(norm_1(x));
    return h + down(torch::gelu(up(norm_2(h))));
  }
  cadre::LayerNorm norm_1{nullptr}, norm_2{nullptr};
  cadre::SelfAttention attention{nullptr};
  cadre::Linear up{nullptr}, down{nullptr};
};

std::vector<cadre::PlanEntry> plan_of(bool is_sequence_parallel) {
  std::vector<cadre::PlanEntry> plan{{"attention.qkv", ParallelStyle::kColwise},
                                     {"attention.output", ParallelStyle::kRowwise},
                                     {"up", ParallelStyle::kColwise},
                                     {"down", ParallelStyle::kRowwise}};
  if (is_sequence_parallel) plan.push_back({"norm_*", ParallelStyle::kSequence});
  return plan;
}

void measure_block(const cadre::ProcessGroup& world, const Settings& settings) {
  torch::manual_seed(0);
  Block block(settings.width);
  const cadre::DeviceMesh mesh(world, {{"tp", world.world_size()}});
  const auto records =
      cadre::parallelize_module(block, mesh["tp"], plan_of(settings.is_sequence_parallel));
  torch::manual_seed(1);
  const int64_t length = std::min<int64_t>(settings.tokens, kMaxSequence);
  const Tensor whole = torch::randn({settings.tokens / length, length, settings.width});
  Tensor input = whole;
  if (settings.is_sequence_parallel) {
    input = whole.chunk(world.world_size(), 1)[world.rank()].clone();
  }
  input.requires_grad_();
  constexpr int kWarmUp = 3;
  std::vector<double> steps, forwards;
  Tensor loss;
  std::clock_t cpu = 0;
  for (int i = 0; i < settings.repeats + kWarmUp; ++i) {
    if (i == kWarmUp) cpu = std::clock();
    const auto start = Clock::now();
    block.zero_grad();
    input.mutable_grad().reset();
    // The loss is that of the whole output; a rank that has only a shard of it computes the terms
    // of that shard.
    loss = (block.forward(input) - 1).pow(2).sum() / static_cast<double>(whole.numel());
    const auto forward = Clock::now();
    loss.backward();
    const auto end = Clock::now();
    if (i < kWarmUp) continue;
    steps.push_back(milliseconds(end - start));
    forwards.push_back(milliseconds(forward - start));
  }
  const double cpu_ms =
      1e3 * static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC / settings.repeats;
  const Tensor sum = loss.detach().to(torch::kDouble);
  if (settings.is_sequence_parallel) world.all_reduce(sum);
  const double norm = cadre::gradient_norm(records);
  if (world.rank() == 0) {
    std::cout.precision(9);
    std::cout << "{\"step_ms\": " << at_share(steps, 0.5)
              << ", \"step_p99_ms\": " << at_share(steps, 0.99)
              << ", \"forward_ms\": " << at_share(forwards, 0.5) << ", \"cpu_ms\": " << cpu_ms
              << ", \"loss\": " << sum.item<double>() << ", \"gradient_norm\": " << norm << "}"
              << std::endl;
  }
  mesh.close();
}

// The two layers whose overhead is measured, and the operations that are subtracted.
class Pair {
 public:
  Pair(const cadre::ProcessGroup& world, const Settings& settings)
      : world_(world),
        is_sequence_parallel_(settings.is_sequence_parallel),
        column_(nn::LinearOptions(settings.width, settings.width).bias(false), world,
                cadre::ColumnParallelOptions{.sequence_parallel = is_sequence_parallel_}),
        row_(nn::LinearOptions(settings.width, settings.width).bias(false), world,
             cadre::RowParallelOptions{.sequence_parallel = is_sequence_parallel_}) {
    const int64_t part = column_->weight.size(0);
    plain_up_ = nn::Linear(nn::LinearOptions(settings.width, part).bias(false));
    plain_down_ = nn::Linear(nn::LinearOptions(part, settings.width).bias(false));
    whole_ = torch::randn({settings.tokens, settings.width});
    hidden_ = torch::randn({settings.tokens, part});
    // The tensors are zeros: they are reduced in place repeatedly, and other values would grow
    // without bound.
    for (auto& tensor : sums_) tensor = torch::zeros_like(whole_);
    for (auto& tensor : shards_) {
      tensor = torch::zeros({settings.tokens / world.world_size(), settings.width});
    }
    plain_input_ = torch::randn(whole_.sizes()).requires_grad_();
    input_ = torch::randn((is_sequence_parallel_ ? shards_[0] : whole_).sizes()).requires_grad_();
    gradient_ = torch::randn(input_.sizes());
    plain_gradient_ = torch::randn(whole_.sizes());
  }

  void drop_gradients() {
    for (Tensor* tensor : {&input_, &column_->weight, &row_->weight, &plain_input_,
                           &plain_up_->weight, &plain_down_->weight}) {
      tensor->mutable_grad().reset();
    }
  }
  void divided() { row_(column_(input_)).backward(gradient_); }
  void plain() { plain_down_(plain_up_(plain_input_)).backward(plain_gradient_); }
  void products() {
    const torch::NoGradGuard no_grad;
    torch::linear(whole_, column_->weight);
    torch::linear(hidden_, row_->weight);
    whole_.mm(row_->weight);
    whole_.t().mm(hidden_);
    hidden_.mm(column_->weight);
    hidden_.t().mm(whole_);
  }
  void collectives() {
    if (!is_sequence_parallel_) {
      world_.all_reduce(sums_[0]);
      world_.all_reduce_async(sums_[1]).wait();
      return;
    }
    world_.all_gather(sums_[0], shards_[0]);
    world_.reduce_scatter(shards_[1], sums_[1]);
    world_.all_gather(sums_[0], shards_[0]);
    const auto gather = world_.all_gather_async(sums_[0], shards_[0]);
    const auto reduction = world_.reduce_scatter_async(shards_[1], sums_[1]);
    gather.wait();
    reduction.wait();
  }

  // Runs the products and collectives in the order of the layers, without autograd. Ranks wait for
  // each other at the same places as in the layers, and the last reduction overlaps with the same
  // product as there.
  void bare() {
    const torch::NoGradGuard no_grad;
    const Tensor input = is_sequence_parallel_ ? gathered(input_) : input_;
    const Tensor hidden = torch::linear(input, column_->weight);
    const Tensor output = torch::linear(hidden, row_->weight);
    if (is_sequence_parallel_) {
      world_.reduce_scatter(torch::empty_like(input_), output);
    } else {
      world_.all_reduce(output);
    }
    const Tensor gradient = is_sequence_parallel_ ? gathered(gradient_) : gradient_;
    const Tensor of_hidden = gradient.mm(row_->weight);
    gradient.t().mm(hidden);
    if (!is_sequence_parallel_) {
      const Tensor of_input = of_hidden.mm(column_->weight);
      const auto reduction = world_.all_reduce_async(of_input);
      of_hidden.t().mm(input);
      reduction.wait();
      return;
    }
    const Tensor again = torch::empty_like(input);
    const auto gather = world_.all_gather_async(again, input_.detach());
    const Tensor of_input = torch::empty_like(input_);
    const auto reduction = world_.reduce_scatter_async(of_input, of_hidden.mm(column_->weight));
    gather.wait();
    of_hidden.t().mm(again);
    reduction.wait();
  }

 private:
  Tensor gathered(const Tensor& shard) const {
    const Tensor whole = torch::empty_like(whole_);
    world_.all_gather(whole, shard.detach());
    return whole;
  }

  cadre::ProcessGroup world_;
  bool is_sequence_parallel_;
  cadre::ColumnParallelLinear column_;
  cadre::RowParallelLinear row_;
  nn::Linear plain_up_{nullptr}, plain_down_{nullptr};
  Tensor input_, plain_input_, gradient_, plain_gradient_, whole_, hidden_;
  std::array<Tensor, 2> sums_, shards_;
};

void measure_overhead(const cadre::ProcessGroup& world, const Settings& settings) {
  Pair pair(world, settings);
  struct Part {
    const char* name;
    std::function<void()> run;
    std::vector<double> times_us = {};
  };
  std::vector<Part> parts{{"pair_us", [&] { pair.divided(); }},
                          {"products_us", [&] { pair.products(); }},
                          {"collectives_us", [&] { pair.collectives(); }},
                          {"bare_us", [&] { pair.bare(); }},
                          {"plain_pair_us", [&] { pair.plain(); }}};
  const int warm_up = settings.repeats / 10;
  for (int i = 0; i < settings.repeats + warm_up; ++i) {
    for (Part& part : parts) {
      pair.drop_gradients();
      world.barrier();
      const auto start = Clock::now();
      part.run();
      const auto end = Clock::now();
      if (i >= warm_up) part.times_us.push_back(1e3 * milliseconds(end - start));
    }
  }
  if (world.rank() != 0) return;
  std::string separator = "{";
  for (const Part& part : parts) {
    std::cout << separator << "\"" << part.name << "\": " << at_share(part.times_us, 0.5);
    separator = ", ";
  }
  std::cout << "}" << std::endl;
}

// Returns false if the arguments are invalid.
bool parse(const std::vector<std::string>& arguments, Settings& settings) {
  if (arguments.empty() || (arguments[0] != "block" && arguments[0] != "overhead")) return false;
  settings.is_block = arguments[0] == "block";
  if (!settings.is_block) settings = {false, false, 4000, 32, 8};
  std::vector<int*> numbers = {&settings.repeats, &settings.width, &settings.tokens};
  size_t num_given = 0;
  for (size_t i = 1; i < arguments.size(); ++i) {
    if (arguments[i] == "--sequence") {
      settings.is_sequence_parallel = true;
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

int main(int argc, char** argv) try {
  Settings settings;
  if (!parse({argv + 1, argv + argc}, settings)) {
    std::cerr << "usage: tensor_parallel_step block|overhead [--sequence] "
                 "[steps|iterations [width [tokens]]], numbers above 0"
              << std::endl;
    return 2;
  }
  at::set_num_threads(1);
  const auto world = cadre::init_process_group();
  if (settings.is_block) {
    measure_block(world, settings);
  } else {
    measure_overhead(world, settings);
  }
  world.close();
  return 0;
} catch (const cadre::Error& error) {
  std::cerr << "tensor_parallel_step: " << error.what() << std::endl;
  return 1;
}
