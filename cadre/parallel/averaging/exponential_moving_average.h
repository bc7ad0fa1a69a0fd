// Keeps the exponential moving average of a module's weights, with which models often evaluate
// better than with those of the last step.
//
//   cadre::ExponentialMovingAverage average{net, {.decay = 0.999}};
//   ...
//   optimizer.step();
//   average.update();
//   ...
//   {
//     const auto averaged = average.swap_in();  // the module has the averages in this scope
//     evaluate(*net);
//   }
//
// The first update copies the weights; each further one computes decay * average + (1 - decay) *
// weight, in float32 for weights of 16 bits. Ranks with equal weights have equal averages, so
// nothing is exchanged. The parameters may be shards that stay as they are between two steps, such
// as those of parallelize_module(); each rank then averages its shard.
//
// Threads: one. Blocking: never. Lifetime: shares the module. Memory: one copy of its parameters.
// Errors: kInvalidArgument for a decay outside of [0, 1), for parameters without values
// (FullyShardedDataParallel gathers and releases them), and for a module whose parameters were
// replaced since. Source: torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace torch::nn {
class Module;
}

namespace cadre {

struct MovingAverageOptions {
  double decay = 0.999;
  // Whether floating-point buffers are averaged, too. If false, and for other buffers, the module
  // keeps its own under swap_in().
  bool average_buffers = false;
};

class CADRE_EXPORT ExponentialMovingAverage {
  struct Averages;

 public:
  // Tensors under names, which a resumed run must load.
  using State = std::vector<std::pair<std::string, at::Tensor>>;

  // While it exists, the module has the averaged weights. The destructor gives it its own back, and
  // drops changes that were made meanwhile; the next update() then throws.
  class [[nodiscard]] CADRE_EXPORT SwappedIn {
   public:
    ~SwappedIn();
    SwappedIn(SwappedIn&&) noexcept = default;
    SwappedIn& operator=(SwappedIn&&) = delete;

   private:
    friend class ExponentialMovingAverage;
    explicit SwappedIn(std::shared_ptr<Averages> averages);

    // Shared, because this object may outlive the average.
    std::shared_ptr<Averages> averages_;
    std::vector<at::Tensor> own_;
    std::vector<uint32_t> versions_;
  };

  explicit ExponentialMovingAverage(const std::shared_ptr<torch::nn::Module>& module,
                                    const MovingAverageOptions& options = {});
  // Takes a module holder, such as torch::nn::Sequential.
  template <typename Holder>
    requires requires { typename Holder::ContainedType; }
  explicit ExponentialMovingAverage(const Holder& module, const MovingAverageOptions& options = {})
      : ExponentialMovingAverage(
            std::shared_ptr<torch::nn::Module>(module.is_empty() ? nullptr : module.ptr()),
            options) {}

  // Adds the present weights. Call it after the optimizer's step.
  void update();
  int64_t num_updates() const;
  // Returns the averages under the names of the parameters and averaged buffers; they share memory
  // with this object. Before the first update they are the weights at construction.
  std::vector<NamedTensor> averages() const;
  // Gives the module the averaged weights. Throws while another SwappedIn exists.
  SwappedIn swap_in();

  // Returns the averages and the number of updates. Shares no memory with this object.
  State state() const;
  // Throws kInvalidArgument, and changes nothing, for the state of another model.
  void load_state(const State& state);

 private:
  std::shared_ptr<Averages> averages_;
};

}  // namespace cadre
