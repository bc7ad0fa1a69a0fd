// Measures the peak of memory of each rank while it trains an MLP with fused AdamW under one
// strategy, and compares it with plan_memory(). Rank 0 prints the bytes of all ranks as one line of
// JSON.
//
//   cadre run --nproc-per-node 2 --no-python memory_peak WAY [layers [width [accumulate]]]
//   WAY: single, ddp, zero1, zero2, fsdp, fsdp-keep (reshard after backward), fsdp-reduction
//        (reshard after the reduction), fsdp-mapped (shards read in place), hsdp (2 replicas)
//
// "counted" is the number of bytes that libtorch has allocated, and "pss" the proportional set
// size; both are the peak since the end of construction. The PSS is read when memory is at its
// peak: whenever the gradient of a weight has been computed and is about to be added, after each
// layer's forward and after the optimizer's step. Blocks until done.
#include <cadre/cadre.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "cadre/parallel/plan/memory_plan.h"
#include "cadre/testing/torch/measured_memory.h"
#include "cadre/testing/torch/plan_wrappers.h"

namespace {

using cadre::testing::CountedMemory;
using torch::Tensor;

constexpr int kSteps = 4;
constexpr int64_t kBatch = 4;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t width)
      : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  Tensor forward(const Tensor& x) { return torch::relu(linear(x)); }
  torch::nn::Linear linear;
};
using Layer = torch::nn::ModuleHolder<LayerImpl>;

struct MlpImpl : torch::nn::Module {
  MlpImpl(int64_t num_layers, int64_t width) {
    for (int64_t i = 0; i < num_layers; ++i) {
      layers.push_back(register_module("layer_" + std::to_string(i), Layer(width)));
    }
  }
  Tensor forward(Tensor x) {
    for (Layer& layer : layers) {
      x = layer->forward(x);
      if (at_peak) at_peak();
    }
    return x;
  }
  std::vector<Layer> layers;
  std::function<void()> at_peak;
};
TORCH_MODULE(Mlp);

struct Settings {
  std::string way;
  int64_t layers;
  int64_t width;
  int64_t accumulate;
};

struct Way {
  std::string name;
  cadre::DataStrategy strategy;
  cadre::Reshard reshard = cadre::Reshard::kAfterForward;
  bool is_mapped = false;
};

const std::vector<Way>& ways() {
  static const std::vector<Way> all = {
      {"single", cadre::DataStrategy::kSingle},
      {"ddp", cadre::DataStrategy::kDdp},
      {"zero1", cadre::DataStrategy::kZero1},
      {"zero2", cadre::DataStrategy::kZero2},
      {"fsdp", cadre::DataStrategy::kFsdp},
      {"fsdp-keep", cadre::DataStrategy::kFsdp, cadre::Reshard::kAfterBackward},
      {"fsdp-reduction", cadre::DataStrategy::kFsdp, cadre::Reshard::kAfterReduction},
      {"fsdp-mapped", cadre::DataStrategy::kFsdp, cadre::Reshard::kAfterForward, true},
      {"hsdp", cadre::DataStrategy::kHsdp}};
  return all;
}

cadre::PlanOptions options_of(const Way& way, const Settings& settings, int num_ranks) {
  return {.strategy = way.strategy,
          .num_ranks = num_ranks,
          .ranks_per_host = num_ranks,
          .accumulate = settings.accumulate,
          .num_replicas = way.strategy == cadre::DataStrategy::kHsdp ? 2 : 1,
          .is_mapped = way.is_mapped,
          .reshard = way.reshard};
}

struct Peak {
  int64_t pss = 0;
  int64_t shared = 0;  // the part of `pss` that is in memory shared by ranks
  int64_t counted = 0;
};

class Trial {
 public:
  Trial(const cadre::ProcessGroup& world, const Settings& settings, const Way& way)
      : world_(world),
        width_(settings.width),
        net_(settings.layers, settings.width),
        plan_(cadre::plan_memory(cadre::model_sizes_of(net_, cadre::wrap_by_type<LayerImpl>()),
                                 options_of(way, settings, world.world_size()))) {
    net_->at_peak = [this] { look(); };
    for (Tensor& parameter : net_->parameters()) {
      parameter.register_hook([this](const Tensor&) { look(); });
    }
  }

  Peak run() {
    cadre::testing::with_planned_wrappers(
        net_, cadre::wrap_by_type<LayerImpl>(), world_, plan_.options,
        [this](auto& model, auto& optimizer, const auto&) { train(model, optimizer); });
    return peak_;
  }

  const cadre::MemoryPlan& plan() const { return plan_; }

 private:
  template <typename Model, typename Optimizer>
  void train(Model& model, Optimizer& optimizer) {
    const Tensor x = torch::randn({kBatch, width_});
    is_looking_ = true;
    CountedMemory::install().reset_peak(0);
    for (int step = 0; step < kSteps; ++step) {
      cadre::testing::accumulate_gradients(model, optimizer, x, plan_.options.accumulate);
      look();
      optimizer.step();
      look();
    }
    peak_.counted = CountedMemory::install().peak_bytes(0);
    peak_.shared = cadre::testing::proportional_size().shared_bytes;
    world_.barrier();
    is_looking_ = false;
  }

  void look() {
    if (is_looking_) peak_.pss = std::max(peak_.pss, cadre::testing::proportional_bytes());
  }

  const cadre::ProcessGroup world_;
  int64_t width_;
  Mlp net_;
  cadre::MemoryPlan plan_;
  bool is_looking_ = false;
  Peak peak_;
};

void print(const char* name, const Tensor& by_rank, int column) {
  std::cout << ", \"" << name << "\": [";
  for (int64_t rank = 0; rank < by_rank.size(0); ++rank) {
    std::cout << (rank == 0 ? "" : ", ") << by_rank[rank][column].item<int64_t>();
  }
  std::cout << "]";
}

void report(const cadre::ProcessGroup& world, const Peak& peak, const cadre::MemoryPlan& plan) {
  const Tensor own = torch::tensor({peak.pss, peak.shared, peak.counted}, torch::kLong);
  const Tensor all = torch::zeros({world.world_size() * 3}, torch::kLong);
  world.all_gather(all, own);
  if (world.rank() != 0) return;
  const cadre::HeldBytes& held = plan.held;
  std::cout << "{\"plan\": " << held.total() << ", \"plan_shared\": " << plan.shared_bytes
            << ", \"plan_parts\": {\"parameters\": " << held.parameters
            << ", \"gradients\": " << held.gradients << ", \"state\": " << held.optimizer_state
            << ", \"full_units\": " << held.full_units
            << ", \"reduction_buffers\": " << held.reduction_buffers
            << ", \"transient\": " << held.transient << "}";
  print("pss", all.view({-1, 3}), 0);
  print("shared", all.view({-1, 3}), 1);
  print("counted", all.view({-1, 3}), 2);
  std::cout << "}" << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int index, int64_t otherwise) {
    return argc > index ? std::max(std::atoll(argv[index]), 0LL) : otherwise;
  };
  const Settings settings = {.way = argc > 1 ? argv[1] : "",
                             .layers = number(2, 12),
                             .width = number(3, 2048),
                             .accumulate = number(4, 1)};
  const auto way = std::ranges::find(ways(), settings.way, &Way::name);
  if (way == ways().end() || argc > 5 ||
      std::min({settings.layers, settings.width, settings.accumulate}) == 0) {
    std::cerr
        << "usage: memory_peak WAY [layers [width [accumulate]]], numbers above 0; WAY is one "
           "of";
    for (const Way& known : ways()) std::cerr << " " << known.name;
    std::cerr << std::endl;
    return 2;
  }
  CountedMemory::install();
  at::set_num_threads(1);
  const auto world = cadre::init_process_group();
  Peak peak;
  cadre::MemoryPlan plan;
  {
    Trial trial(world, settings, *way);
    plan = trial.plan();
    peak = trial.run();
  }
  report(world, peak, plan);
  world.close();
  return 0;
}
