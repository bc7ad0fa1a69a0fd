// Tensor, context and expert parallelism under a strategy of the replicas. The processes of a
// replica have parts of the layers, or tokens of the same rows, or experts and rows of their own.
//
// Threads, blocking and errors: those of Strategy. Lifetime: owns the strategy and the division.
#pragma once

#include <memory>
#include <vector>

#include "cadre/train/trainer/strategy/model_division.h"
#include "cadre/train/trainer/strategy/strategy.h"

namespace cadre::train {

class Divided final : public ForwardStrategy {
 public:
  // replicas: the strategy for the replicas of the divided model.
  Divided(std::unique_ptr<ForwardStrategy> replicas, ModelDivision division);

  at::Tensor forward(const at::Tensor& data, int64_t num_samples) override;
  at::Tensor infer(const at::Tensor& data) override;
  void set_training(bool on) override { replicas_->set_training(on); }
  void set_accumulating(bool on) override { replicas_->set_accumulating(on); }
  void set_rows(const SampledRows& rows) override { replicas_->set_rows(rows); }
  Model& model() override { return replicas_->model(); }
  bool has_whole_model() const override { return false; }
  std::vector<ParameterShard> gradient_shards() const override;
  std::vector<ParameterShard> owned_shards() const override;
  double clip_gradients(double max_norm) override;
  torch::optim::Optimizer& optimizer() override { return replicas_->optimizer(); }
  torch::optim::Optimizer& local_optimizer() override { return replicas_->local_optimizer(); }
  SnapshotParts parts() const override { return division_.snapshot_parts(owned_shards()); }
  bool holds_parts() const override { return true; }
  std::optional<BucketLayout> learned_layout() const override {
    return replicas_->learned_layout();
  }

 protected:
  at::Tensor loss(const Task& task, const at::Tensor& output,
                  const at::Tensor& target) const override;
  double share_of_step(int64_t num_rows, int64_t num_samples) const override {
    return division_.share_of_step(num_rows, num_samples);
  }
  void finish_gradients() override;

 private:
  std::unique_ptr<ForwardStrategy> replicas_;
  ModelDivision division_;
};

}  // namespace cadre::train
