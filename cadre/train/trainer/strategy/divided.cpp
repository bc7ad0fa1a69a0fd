#include "cadre/train/trainer/strategy/divided.h"

#include <span>
#include <utility>

#include "cadre/parallel/shard/sharded_norm.h"

namespace cadre::train {

Divided::Divided(std::unique_ptr<ForwardStrategy> replicas, ModelDivision division)
    : replicas_(std::move(replicas)), division_(std::move(division)) {}

at::Tensor Divided::forward(const at::Tensor& data, int64_t num_samples) {
  return replicas_->forward(data, num_samples);
}

at::Tensor Divided::infer(const at::Tensor& data) {
  return division_.whole_logits(replicas_->infer(division_.padded(data)), data.size(1));
}

std::vector<ParameterShard> Divided::gradient_shards() const {
  const std::vector<ParameterShard> shards = replicas_->gradient_shards();
  return shards.empty() ? division_.records() : shards;
}

std::vector<ParameterShard> Divided::owned_shards() const {
  const std::vector<ParameterShard> shards = replicas_->owned_shards();
  return shards.empty() ? division_.records() : shards;
}

double Divided::clip_gradients(double max_norm) {
  const std::vector<ParameterShard> shards = gradient_shards();
  return clip_grad_norm_(std::span<const ParameterShard>(shards), max_norm);
}

at::Tensor Divided::loss(const Task& /*task*/, const at::Tensor& output,
                         const at::Tensor& target) const {
  return division_.loss(output, target);
}

void Divided::finish_gradients() {
  division_.sum_gradients(gradient_shards());
}

}  // namespace cadre::train
