#include "cadre/train/evaluation.h"

#include <torch/torch.h>

#include "cadre/data/data_loader.h"
#include "cadre/train/tasks/task.h"
#include "cadre/wrap/replica_group.h"

namespace cadre::train {
namespace {

constexpr int64_t kBatchSizePerRank = 16;

}  // namespace

Evaluation evaluate(const Inference& infer, const Task& task, ReplicaGroup& replicas) {
  const torch::NoGradGuard no_grad;
  const int world_size = replicas.world_size();
  DataLoader loader(task.held_out_data(), {.batch_size = kBatchSizePerRank * world_size,
                                           .rank = replicas.rank(),
                                           .world_size = world_size,
                                           .shuffle = false});
  double loss = 0;
  double num_right = 0;
  double num_samples = 0;
  for (const auto& [data, target] : loader.epoch(0)) {
    const at::Tensor output = infer(data);  // collective, if the ranks hold parts of the model
    const auto count = static_cast<double>(data.size(0));
    if (count == 0) continue;
    loss += task.loss(output, target).item<double>() * count;
    num_samples += count;
    if (task.is_classification()) {
      num_right += static_cast<double>(output.argmax(-1).eq(target).sum().item<int64_t>());
    }
  }
  const at::Tensor sums = torch::tensor({loss, num_right, num_samples}, torch::kFloat64);
  replicas.all_reduce(sums, ReduceOp::kSum);
  const auto* values = sums.const_data_ptr<double>();
  Evaluation evaluation{.loss = values[0] / values[2], .bigram_entropy = task.bigram_entropy()};
  if (task.is_classification()) evaluation.accuracy = values[1] / values[2];
  return evaluation;
}

}  // namespace cadre::train
