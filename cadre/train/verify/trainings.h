// The trainings of a user's module that a verification compares: one without a wrapper, and one
// with each wrapper.
//
// Threads: one. Blocking: constructors and methods of trainings with a wrapper are collective.
// Lifetime: keeps the program, the module and the group. Errors: those of the wrappers and of the
// user's functions.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/utils/clip_grad.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/train/verify/stepped_training.h"
#include "cadre/train/verify/strategy_case.h"
#include "cadre/train/verify/verify_program.h"

namespace cadre::verify {

// Collective. Runs `prepare`, which must contain no collective. If it throws on one rank, all ranks
// throw that error.
CADRE_EXPORT void prepare_on_all_ranks(const ProcessGroup& world,
                                       const std::function<void()>& prepare);

// Throws for batches that ranks cannot divide. Also throws if all ranks have equal rows in every
// step: each rank would then compute the gradient of the whole batch by itself, and the
// verification would not notice a missing reduction.
template <typename Program>
void check_rows_of_ranks(Program& program, int world_size) {
  bool is_equal = world_size > 1;
  for (int64_t step = 1; step <= program.options.num_steps; ++step) {
    const auto batch = program.batch(step);
    const FlatRange all{.begin = 0, .end = num_rows_of_batch(batch)};
    if (!is_equal) continue;
    const auto rows_of_rank = [&](int64_t rank) {
      return rows_of_batch(batch, rows_of_part(all, {.index = rank, .count = world_size}));
    };
    for (int64_t rank = 1; is_equal && rank < world_size; ++rank) {
      is_equal = have_equal_rows(rows_of_rank(0), rows_of_rank(rank));
    }
  }
  if (!is_equal) return;
  throw Error(ErrorCode::kInvalidArgument,
              "verify_strategies: make_batch() gives every rank the same rows in every step, so a "
              "missing reduction of the gradients would not be noticed; return rows that differ");
}

template <typename Program>
class PlainTraining final : public ReferenceTraining {
 public:
  PlainTraining(const std::shared_ptr<Program>& program, const ProcessGroup& alone)
      : program_(program),
        alone_(alone),
        model_(program->module(alone)),
        optimizer_(tensors_of(whole_parameters(*model_.module())), program->optimizer) {}

  double backward(int64_t step) override {
    optimizer_.zero_grad();
    const auto rows = program_->batch(step);
    (void)num_rows_of_batch(rows);  // throws for a batch that ranks could not divide
    const at::Tensor loss = program_->loss_of(model_, rows, alone_);
    loss.backward();
    if (const auto limit = program_->options.clip_norm) {
      torch::nn::utils::clip_grad_norm_(model_->parameters(), *limit);
    }
    return loss.template item<double>();
  }
  std::vector<NamedTensor> gradients() override { return whole_gradients(*model_.module()); }
  void update(int64_t /*step*/) override { optimizer_.step(); }
  std::vector<NamedTensor> parameters() override { return whole_parameters(*model_.module()); }
  std::vector<NamedTensor> buffers() override { return distinct_buffers(*model_.module()); }

  std::unique_ptr<UpdateRule> rule_for(const std::vector<NamedTensor>& parameters) override {
    return std::make_unique<Rule>(tensors_of(parameters), program_->optimizer);
  }

 private:
  static std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& parameters) {
    std::vector<at::Tensor> tensors;
    for (const NamedTensor& parameter : parameters) tensors.push_back(parameter.tensor);
    return tensors;
  }

  using Optimizer = typename Program::PlainOptimizer;

  class Rule final : public UpdateRule {
   public:
    template <typename Options>
    Rule(std::vector<at::Tensor> parameters, const Options& options)
        : optimizer_(std::move(parameters), options) {}
    void update(int64_t /*step*/) override { optimizer_.step(); }

   private:
    Optimizer optimizer_;
  };

  std::shared_ptr<Program> program_;
  ProcessGroup alone_;
  PlainModel<typename Program::Module> model_;
  Optimizer optimizer_;
};

// The base class of the trainings with a wrapper: computes this rank's share of a batch, in parts.
// `world` is the group of the case.
template <typename Program, typename Wrapper>
class WrappedTraining : public SteppedTraining {
 public:
  double backward(int64_t step) override {
    optimizer().zero_grad();
    const auto batch = program_->batch(step);
    const PlannedStep plan = program_->plan_step(strategy_, step, num_rows_of_batch(batch), world_);
    double mean = 0;
    for (const PlannedBackward& planned : plan.backwards) {
      std::optional<NoSync> no_sync;
      if (planned.is_local) no_sync.emplace(model_.no_sync({.losses_are_weighted = true}));
      // The forward also runs if this rank has no rows, because a forward of a sharded model is a
      // collective.
      const at::Tensor loss = program_->loss_of(model_, rows_of_batch(batch, planned.rows), world_);
      (planned.weight == 1 ? loss : loss * planned.weight).backward();
      no_sync.reset();
      if (planned.share_of_batch == 0) continue;  // equal on all ranks
      mean +=
          planned.share_of_batch * program_->mean_loss(model_, loss, planned.rows.size(), world_);
    }
    if (plan.is_reduced_at_end) model_.reduce_gradients();
    if (const auto limit = program_->options.clip_norm) clip_grad_norm_(model_, *limit);
    return mean;
  }
  std::vector<NamedTensor> gradients() override {
    return program_->gradients_of(model_, strategy_, world_);
  }
  void update(int64_t /*step*/) override { optimizer().step(); }
  std::vector<NamedTensor> parameters() override {
    return program_->parameters_of(model_, strategy_, world_);
  }
  std::vector<NamedTensor> buffers() override {
    if (strategy_.num_parts > 1) return {};
    return distinct_buffers(*model_.module());
  }

 protected:
  template <typename Ranks, typename Options>
  WrappedTraining(const std::shared_ptr<Program>& program, const ProcessGroup& world,
                  const StrategyCase& strategy, const Ranks& ranks, const Options& options)
      : program_(program),
        world_(world),
        strategy_(strategy),
        model_(program->module(world), ranks, options) {}

  virtual torch::optim::Optimizer& optimizer() = 0;

  std::shared_ptr<Program> program_;
  ProcessGroup world_;
  StrategyCase strategy_;
  Wrapper model_;
};

// The training under ddp: every rank updates all parameters.
template <typename Program>
using DdpTraining = WrappedTraining<Program, DistributedDataParallel<typename Program::Module>>;

template <typename Program>
class ReplicatedTraining final : public DdpTraining<Program> {
 public:
  ReplicatedTraining(const std::shared_ptr<Program>& program, const ProcessGroup& world,
                     const StrategyCase& strategy)
      : DdpTraining<Program>(program, world, strategy, program->options.group_for(world),
                             program->ddp_options(strategy)),
        optimizer_(this->model_.parameters(), program->optimizer) {}

 private:
  torch::optim::Optimizer& optimizer() override { return optimizer_; }

  typename Program::RankOptimizer optimizer_;
};

// The training under zero1 (whole gradients on every rank) or zero2 (sharded gradients).
template <typename Program>
class ZeroTraining final : public DdpTraining<Program> {
 public:
  ZeroTraining(const std::shared_ptr<Program>& program, const ProcessGroup& world,
               const StrategyCase& strategy)
      : DdpTraining<Program>(program, world, strategy, program->options.group_for(world),
                             program->ddp_options(strategy)),
        optimizer_(this->model_, program->optimizer, program->zero_options()) {}

  std::vector<NamedTensor> parameters() override {
    optimizer_.wait();
    return DdpTraining<Program>::parameters();
  }

 private:
  torch::optim::Optimizer& optimizer() override { return optimizer_; }

  ZeroRedundancyOptimizer<typename Program::RankOptimizer> optimizer_;
};

// The training under fsdp or hsdp.
template <typename Program>
using FsdpTraining = WrappedTraining<Program, FullyShardedDataParallel<typename Program::Module>>;

template <typename Program>
class ShardedTraining final : public FsdpTraining<Program> {
 public:
  ShardedTraining(const std::shared_ptr<Program>& program, const ProcessGroup& world,
                  const StrategyCase& strategy)
      : ShardedTraining(program, world, strategy, groups_of(*program, world, strategy)) {}

  void close() override { mesh_.close(); }

 private:
  ShardedTraining(const std::shared_ptr<Program>& program, const ProcessGroup& world,
                  const StrategyCase& strategy, const parallel::ShardGroups& groups)
      : FsdpTraining<Program>(program, world, strategy, groups, program->fsdp_options(strategy)),
        mesh_(groups.mesh),
        optimizer_(this->model_, program->optimizer) {}

  static parallel::ShardGroups groups_of(const Program& program, const ProcessGroup& world,
                                         const StrategyCase& strategy) {
    const auto& group_for = program.options.group_for;
    if (strategy.strategy == DataStrategy::kFsdp) {
      parallel::ShardGroups groups = parallel::ShardGroups::of(world);
      groups.all = group_for(world);
      return groups;
    }
    const int num_replicas = strategy.num_replicas;
    const DeviceMesh mesh(
        world, {{"replicate", num_replicas}, {"shard", world.world_size() / num_replicas}});
    parallel::ShardGroups groups = parallel::ShardGroups::of(mesh);
    groups.all = group_for(mesh.joint_group());
    groups.shard = group_for(mesh.group("shard"));
    groups.replicate = group_for(mesh.group("replicate"));
    return groups;
  }
  torch::optim::Optimizer& optimizer() override { return optimizer_; }

  DeviceMesh mesh_;
  ShardedOptimizer<typename Program::RankOptimizer> optimizer_;
};

template <typename Program>
std::unique_ptr<SteppedTraining> make_wrapped_training(const std::shared_ptr<Program>& program,
                                                       const ProcessGroup& world,
                                                       const StrategyCase& strategy) {
  switch (strategy.strategy) {
    case DataStrategy::kSingle:
      throw Error(
          ErrorCode::kInvalidArgument,
          "verify: kSingle is the reference and no strategy of several ranks; choose another");
    case DataStrategy::kDdp:
      return std::make_unique<ReplicatedTraining<Program>>(program, world, strategy);
    case DataStrategy::kZero1:
    case DataStrategy::kZero2:
      return std::make_unique<ZeroTraining<Program>>(program, world, strategy);
    default:
      return std::make_unique<ShardedTraining<Program>>(program, world, strategy);
  }
}

}  // namespace cadre::verify
