#include "cadre/train/strategy.h"

#include <limits>
#include <utility>
#include <vector>

#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/train/models/model.h"
#include "cadre/wrap/gradient_norm.h"

namespace cadre::train {
namespace {

class Replicated final : public Strategy {
 public:
  Replicated(const std::shared_ptr<Model>& model, const ProcessGroup& world,
             std::optional<BucketLayout> layout)
      : model_(model, world,
               {.weighting = GradientWeighting::kSamples, .layout = std::move(layout)}) {}

  at::Tensor forward(const at::Tensor& data, int64_t num_samples) override {
    model_.set_num_samples(num_samples);
    return model_.forward(data);
  }

  void set_accumulating(bool on) override {
    if (!on) {
      no_sync_.reset();
    } else if (!no_sync_) {
      no_sync_.emplace(model_.no_sync());
    }
  }

  std::vector<TrainedTensor> trained() const override {
    NamedTensors parameters;
    for (const auto& item : model_->named_parameters()) {
      parameters.emplace_back(item.key(), item.value());
    }
    return trained_tensors(parameters);
  }

  double clip_gradients(double max_norm) override {
    return clip_grad_norm_(model_.parameters(), max_norm);
  }

  std::optional<BucketLayout> learned_layout() const override { return model_.learned_layout(); }

 private:
  DistributedDataParallel<Model> model_;
  std::optional<NoSync> no_sync_;
};

}  // namespace

std::unique_ptr<Strategy> make_strategy(const ParallelConfig& /*config*/,
                                        const std::shared_ptr<Model>& model,
                                        const ProcessGroup& world,
                                        std::optional<BucketLayout> layout) {
  return std::make_unique<Replicated>(model, world, std::move(layout));
}

}  // namespace cadre::train
