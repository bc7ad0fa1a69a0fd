#include "cadre/parallel/averaging/averaging_rule.h"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/serialize.h>

#include <string>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/averaging/flat_exchange.h"
#include "cadre/parallel/buckets/comm_hook.h"
#include "cadre/tensor/hooks/replica_check.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/tensor/optim/state_loading.h"

namespace cadre::averaging {
namespace {

std::vector<at::Tensor> tensors_of(const std::vector<NamedTensor>& named) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& one : named) tensors.push_back(one.tensor);
  return tensors;
}

std::vector<at::Tensor> tensors_of(const Averaged& averaged) {
  std::vector<at::Tensor> tensors = tensors_of(averaged.parameters);
  for (const NamedTensor& buffer : averaged.buffers) tensors.push_back(buffer.tensor);
  return tensors;
}

void write(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& values) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(values[i]);
}

// Periodic and hierarchical averaging: means over groups.
class Levels final : public Rule {
 public:
  struct Level {
    int64_t period;
    ProcessGroup group;
  };
  // first: the number of steps before the first one that counts for a period.
  struct Schedule {
    std::vector<Level> levels;
    int64_t warmup_steps;
    int64_t first;
  };
  Levels(Averaged averaged, ProcessGroup all, Schedule schedule)
      : averaged_(std::move(averaged)), all_(std::move(all)), schedule_(std::move(schedule)) {}

  bool is_due(int64_t step) const override { return level_of(step) != nullptr; }
  bool makes_all_equal(int64_t step) const override {
    const Level* const level = level_of(step);
    return level != nullptr && level->group.world_size() == all_.world_size();
  }
  void average(int64_t step) override { average_over(level_of(step)->group); }
  void synchronize() override { average_over(all_); }

 private:
  const Level* level_of(int64_t step) const {
    const int64_t num_earlier = step - 1;
    if (num_earlier < schedule_.warmup_steps) return nullptr;
    for (auto level = schedule_.levels.rbegin(); level != schedule_.levels.rend(); ++level) {
      if ((num_earlier - schedule_.first) % level->period == 0) return &*level;
    }
    return nullptr;
  }
  void average_over(const ProcessGroup& group) const {
    if (group.world_size() == 1) return;
    const std::vector<at::Tensor> tensors = tensors_of(averaged_);
    write(tensors, means_over(group, tensors));
  }

  Averaged averaged_;
  ProcessGroup all_;
  Schedule schedule_;
};

class GossipRule final : public Rule {
 public:
  GossipRule(Averaged averaged, ProcessGroup all, ProcessGroup own, const Gossip& method)
      : averaged_(std::move(averaged)),
        all_(std::move(all)),
        own_(std::move(own)),
        method_(method) {}

  bool is_due(int64_t step) const override { return step % method_.period == 0; }
  bool makes_all_equal(int64_t) const override { return all_.world_size() <= 2; }
  void average(int64_t step) override {
    const Partners partners = partners_of(method_.graph, {.exchange = step / method_.period - 1,
                                                          .rank = own_.rank(),
                                                          .num_ranks = own_.world_size()});
    if (partners.destination == own_.rank()) return;
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor> tensors = tensors_of(averaged_);
    const FlatCopies copies(tensors);
    std::vector<at::Tensor> received;
    std::vector<P2POp> messages;
    for (const at::Tensor& flat : copies.flats()) {
      received.push_back(at::empty_like(flat));
      messages.push_back(P2POp::send(flat, partners.destination));
      messages.push_back(P2POp::recv(received.back(), partners.source));
    }
    own_.batch_send_recv(messages);
    std::vector<at::Tensor> means;
    for (size_t i = 0; i < received.size(); ++i) {
      // The sum is one of float32 if the parameters have 16 bits, because it could overflow.
      const at::ScalarType sum = at::toOpMathType(copies.flats()[i].scalar_type());
      means.push_back(copies.flats()[i].to(sum).add(received[i].to(sum)).div_(2));
    }
    write(tensors, copies.parts_of(means));
  }
  void synchronize() override {
    if (all_.world_size() == 1) return;
    const std::vector<at::Tensor> tensors = tensors_of(averaged_);
    write(tensors, means_over(all_, tensors));
  }

 private:
  Averaged averaged_;
  ProcessGroup all_;
  // The same ranks. Its messages cannot be taken for those of the program.
  ProcessGroup own_;
  Gossip method_;
};

constexpr const char* kWeights = "synchronized.";
constexpr const char* kOptimizer = "outer_optimizer";
constexpr const char* kExchange = "exchange.";
constexpr const char* kOuterOptimizer = "the outer optimizer of DiLoCo";

// What DiLoCo keeps: the synchronized weights and the optimizer that steps them.
struct Outer {
  std::vector<at::Tensor> weights;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

std::unique_ptr<torch::optim::Optimizer> make_outer_optimizer(
    const DiLoCo& method, const std::vector<at::Tensor>& weights) {
  if (!method.make_optimizer) {
    return std::make_unique<SGD>(weights, torch::optim::SGDOptions(method.learning_rate)
                                              .momentum(method.momentum)
                                              .nesterov(method.momentum > 0));
  }
  auto optimizer = method.make_optimizer(weights);
  if (optimizer != nullptr) return optimizer;
  throw Error(ErrorCode::kInvalidArgument,
              "ModelAverager: DiLoCo::make_optimizer has returned null; expected an optimizer of "
              "the weights that it is given");
}

class DiLoCoRule final : public Rule {
 public:
  DiLoCoRule(Averaged averaged, ProcessGroup group, const DiLoCo& method)
      : averaged_(std::move(averaged)), group_(std::move(group)), method_(method) {
    std::vector<at::Tensor> weights;
    for (const NamedTensor& parameter : averaged_.parameters) {
      weights.push_back(
          parameter.tensor.detach().to(at::toOpMathType(parameter.tensor.scalar_type()),
                                       /*non_blocking=*/false, /*copy=*/true));
    }
    outer_ = outer_of(std::move(weights));
    if (method_.exchange) hook_ = method_.exchange->make_state();
  }

  bool is_due(int64_t step) const override { return step % method_.period == 0; }
  bool makes_all_equal(int64_t) const override { return true; }
  void average(int64_t) override { synchronize(); }
  void synchronize() override {
    check_weights_equal();
    const std::vector<at::Tensor> gradients = outer_gradients();
    std::vector<at::Tensor> buffers = tensors_of(averaged_.buffers);
    std::vector<at::Tensor> means_of_buffers = means_over(group_, buffers);
    for (size_t i = 0; i < gradients.size(); ++i) {
      outer_.weights[i].mutable_grad() = gradients[i];
    }
    outer_.optimizer->step();
    for (const at::Tensor& weight : outer_.weights) weight.mutable_grad().reset();
    write(tensors_of(averaged_.parameters), outer_.weights);
    write(buffers, means_of_buffers);
  }

  void save(NamedState& state) const override {
    for (size_t i = 0; i < outer_.weights.size(); ++i) {
      state.emplace_back(kWeights + averaged_.parameters[i].name,
                         outer_.weights[i].detach().clone());
    }
    torch::serialize::OutputArchive archive;
    outer_.optimizer->save(archive);
    std::string bytes;
    archive.save_to([&bytes](const void* data, size_t size) {
      bytes.append(static_cast<const char*>(data), size);
      return size;
    });
    state.emplace_back(
        kOptimizer,
        at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte).clone());
    if (hook_ == nullptr) return;
    for (const auto& [name, tensor] : hook_->saved()) {
      state.emplace_back(kExchange + name, tensor.clone());
    }
  }
  std::function<void()> load(SavedTensors& saved) override {
    std::vector<at::Tensor> weights;
    for (size_t i = 0; i < outer_.weights.size(); ++i) {
      const at::Tensor& own = outer_.weights[i];
      const at::Tensor taken =
          saved.take(kWeights + averaged_.parameters[i].name, own.sizes(), own.scalar_type());
      weights.push_back(taken.detach().to(own.device(), own.scalar_type(), /*non_blocking=*/false,
                                          /*copy=*/true));
    }
    const auto loaded = std::make_shared<Outer>(outer_of(std::move(weights)));
    const at::Tensor bytes = saved.take_bytes(kOptimizer).cpu().contiguous();
    optim_state::load_archive(kOuterOptimizer, [&] {
      torch::serialize::InputArchive archive;
      archive.load_from(static_cast<const char*>(bytes.const_data_ptr()),
                        static_cast<size_t>(bytes.numel()));
      loaded->optimizer->load(archive);
    });
    std::shared_ptr<CommHook::State> hook;
    const NamedState of_hook = saved.take_all(kExchange);
    if (hook_ != nullptr) {
      hook = method_.exchange->make_state();
      hook->load(of_hook);
    }
    return [this, loaded, hook] {
      outer_ = std::move(*loaded);
      hook_ = hook;
    };
  }

 private:
  Outer outer_of(std::vector<at::Tensor> weights) const {
    for (const at::Tensor& weight : weights) weight.requires_grad_(true);
    auto optimizer = make_outer_optimizer(method_, weights);
    return {.weights = std::move(weights), .optimizer = std::move(optimizer)};
  }

  // Ranks whose outer optimizers differ would train different models from the next step on.
  void check_weights_equal() const {
    if (group_.world_size() == 1) return;
    if (const auto unlike = wrap::first_unlike(outer_.weights, group_)) {
      throw Error(ErrorCode::kInvalidArgument,
                  format("ModelAverager: the synchronized weights of \"{}\" differ between rank 0 "
                         "and rank {}, because their outer optimizers differ: make "
                         "DiLoCo::make_optimizer return the same optimizer on all ranks",
                         averaged_.parameters[unlike->place].name, unlike->rank));
    }
  }

  // Returns the means over the ranks of the synchronized weights minus the parameters.
  std::vector<at::Tensor> outer_gradients() {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (size_t i = 0; i < outer_.weights.size(); ++i) {
      gradients.push_back(outer_.weights[i] - averaged_.parameters[i].tensor);
    }
    if (hook_ == nullptr || group_.world_size() == 1) return means_over(group_, gradients);
    reduce_with_hook(gradients);
    return gradients;
  }
  // One bucket for each parameter, because a hook may use one scale for a bucket, and parameters
  // change by different amounts.
  void reduce_with_hook(std::vector<at::Tensor>& gradients) {
    std::vector<FinishReduction> finishes;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor flat = gradients[i].contiguous().view({-1});
      flat.div_(group_.world_size());
      gradients[i] = flat.view(gradients[i].sizes());
      finishes.push_back(hook_->start({.index = i,
                                       .is_last = i + 1 == gradients.size(),
                                       .buffer = flat,
                                       .gradients = {gradients[i]},
                                       .parameters = {averaged_.parameters[i].tensor},
                                       .weight = 1.0 / group_.world_size()},
                                      group_));
    }
    for (const FinishReduction& finish : finishes) finish();
  }
  Averaged averaged_;
  ProcessGroup group_;
  DiLoCo method_;
  Outer outer_;
  std::shared_ptr<CommHook::State> hook_;  // shared with the function that load() returns
};

// Splits groups of `size` consecutive ranks. They fail together with `group`.
ProcessGroup split_in(const ProcessGroup& group, int size, const std::string& name) {
  if (group.world_size() == 1) return group;
  ProcessGroup part =
      *group.split({.color = group.rank() / size, .key = group.rank(), .name = name});
  group.communicator().fail_together(part.communicator());
  return part;
}

}  // namespace

std::unique_ptr<Rule> make_rule(const AveragingMethod& method, const Averaged& averaged,
                                const ProcessGroup& group) {
  if (const auto* const periodic = std::get_if<PeriodicAveraging>(&method)) {
    return std::make_unique<Levels>(
        averaged, group,
        Levels::Schedule{.levels = {{.period = periodic->period, .group = group}},
                         .warmup_steps = periodic->warmup_steps,
                         .first = periodic->warmup_steps});
  }
  if (const auto* const levels = std::get_if<HierarchicalAveraging>(&method)) {
    Levels::Schedule schedule = {.levels = {}, .warmup_steps = levels->warmup_steps, .first = 0};
    for (const AveragingLevel& level : levels->levels) {
      const bool is_whole = level.group_size == group.world_size();
      schedule.levels.push_back(
          {.period = level.period,
           .group = is_whole ? group
                             : split_in(group, level.group_size,
                                        format("averaging_{}", level.group_size))});
    }
    return std::make_unique<Levels>(averaged, group, std::move(schedule));
  }
  if (const auto* const diloco = std::get_if<DiLoCo>(&method)) {
    return std::make_unique<DiLoCoRule>(averaged, group, *diloco);
  }
  const ProcessGroup own = split_in(group, group.world_size(), "gossip");
  return std::make_unique<GossipRule>(averaged, group, own, std::get<Gossip>(method));
}

}  // namespace cadre::averaging
