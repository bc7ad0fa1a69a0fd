// A pipeline of a Gpt: processes have different blocks and pass microbatches to each other. Each
// stage may be divided along tp and cp, and may have replicas or shards along the axes of the
// strategy.
//
// Threads, blocking and errors: those of Strategy. Lifetime: keeps the stages of this process only.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/pp/pipeline.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/train/trainer/strategy/model_division.h"
#include "cadre/train/trainer/strategy/optimizer.h"
#include "cadre/train/trainer/strategy/stage_times.h"
#include "cadre/train/trainer/strategy/strategy.h"
#include "cadre/train/training/pipeline_parameters.h"

namespace cadre::train {

class Pipelined final : public Strategy {
 public:
  // `whole` has the same values on all processes; the stages are made of its layers.
  Pipelined(const Config& config, const Gpt& whole, const RunLayout& layout,
            const OptimizerChoice& choice);

  // Runs the configured number of microbatches; ignores options.num_parts and around_forward.
  ScalarSum backward(const Task& task, const Batch& batch, const BackwardOptions& options) override;
  at::Tensor infer(const at::Tensor& data) override;
  void set_training(bool on) override;
  bool has_whole_model() const override { return false; }
  std::vector<ParameterShard> gradient_shards() const override { return parameters_->records(); }
  double clip_gradients(double max_norm) override;
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  void step(double learning_rate) override;
  SnapshotParts parts() const override { return division_.snapshot_parts(parameters_->records()); }
  bool holds_parts() const override { return true; }
  void parts_were_filled() override { parameters_->fill_copies(); }
  std::string summary(const ProcessGroup& world) const override;

 private:
  void make_pipeline(const Config& config, const RunLayout& layout);

  DeviceMesh mesh_;
  PipelineSchedule schedule_;
  int64_t vocabulary_;
  // The stages of this process, with their numbers.
  std::vector<std::pair<int, std::shared_ptr<Gpt>>> stages_;
  ModelDivision division_;
  std::unique_ptr<Pipeline> pipeline_;
  StageTimes times_;
  SampledRows rows_;
  std::optional<training_parts::PipelineParameters> parameters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace cadre::train
