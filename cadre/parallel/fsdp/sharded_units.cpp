#include "cadre/parallel/fsdp/sharded_units.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::parallel {

ShardedUnits::ShardedUnits(std::unique_ptr<UnitSchedule> schedule,
                           const std::vector<at::Tensor>& trained,
                           std::vector<ShardPrecision> precisions)
    : schedule_(std::move(schedule)), precisions_(std::move(precisions)) {
  if (trained.empty()) return;
  hooks_ = std::make_unique<wrap::AccumulationHooks>(trained, [this](size_t parameter) {
    enter_backward();
    schedule_->gradient_arrived(parameter);
  });
}

void ShardedUnits::observe(std::vector<std::vector<NamedTensor>> parameters,
                           std::vector<at::Tensor> shards) {
  parameters_ = std::move(parameters);
  for (size_t unit = 0; unit < parameters_.size(); ++unit) {
    std::vector<at::Tensor> tensors;
    is_trained_.emplace_back();
    for (const NamedTensor& parameter : parameters_[unit]) {
      tensors.push_back(parameter.tensor);
      is_trained_.back().push_back(parameter.tensor.requires_grad());
    }
    observed_.push_back(
        std::make_unique<wrap::ObservedParameters>(std::move(tensors), weak_from_this(), unit));
  }
  observed_shards_ = std::make_unique<wrap::ObservedParameters>(std::move(shards), weak_from_this(),
                                                                schedule_->num_units());
}

void ShardedUnits::check_observed() const {
  for (size_t unit = 0; unit < observed_.size(); ++unit) {
    const auto lost = observed_[unit]->first_lost();
    if (!lost) continue;
    throw Error(ErrorCode::kInvalidArgument,
                format("FullyShardedDataParallel: \"{}\" has been given other memory since it was "
                       "sharded, by set_data() or by to() of its module, so it is not gathered any "
                       "more. Change the parameter before the module is wrapped",
                       parameters_[unit][*lost].name));
  }
}

void ShardedUnits::begin_use(const Use& use) {
  if (use.number == schedule_->num_units()) {
    if (use.is_written) schedule_->expect_other_values();
    return;
  }
  if (schedule_->is_in_backward()) creates_graph_ &= wrap::current_backward_creates_graph();
  if (schedule_->is_outside()) {
    if (wrap::is_in_backward()) {
      enter_backward();
    } else if (use.is_written) {
      schedule_->refuse_write(use.number);
    } else {
      if (schedule_->is_idle()) check_observed();
      check_frozen(use.number);
    }
  }
  schedule_->begin_use(use.number);
}

// A parameter that is trained only now has no hook that reduces its gradient.
void ShardedUnits::check_frozen(size_t unit) const {
  for (size_t i = 0; i < parameters_[unit].size(); ++i) {
    const NamedTensor& parameter = parameters_[unit][i];
    if (is_trained_[unit][i] || !parameter.tensor.requires_grad()) continue;
    throw Error(
        ErrorCode::kInvalidArgument,
        format("FullyShardedDataParallel: \"{}\" was frozen when the module was wrapped, and "
               "requires grad now, so its gradient would not be reduced. Choose which "
               "parameters are trained before the module is wrapped; a parameter that was "
               "trained then may be frozen for a time",
               parameter.name));
  }
}

void ShardedUnits::end_use(const Use& use) noexcept {
  if (use.number < schedule_->num_units()) return schedule_->end_use(use.number);
  // The operation may have read parameters, too, which were gathered before it has written.
  if (use.is_written) schedule_->expect_other_values();
}

ShardedUnits::Call ShardedUnits::before_forward(size_t unit, std::span<const at::Tensor> inputs) {
  if (unit == 0) {
    schedule_->begin_forward(at::GradMode::is_enabled());
  } else {
    schedule_->before_forward(unit);
  }
  auto call = std::make_shared<UnitSchedule::Call>(UnitSchedule::Call{.unit = unit});
  // Hooks on the root's inputs are not needed, because the root is always freed only at the end of
  // the backward.
  if (unit != 0 && at::GradMode::is_enabled()) watch_inputs(call, inputs);
  return call;
}

void ShardedUnits::after_forward(const Call& call, std::span<const at::Tensor> outputs) {
  if (at::GradMode::is_enabled()) watch_outputs(call, outputs);
  if (call->unit == 0) {
    schedule_->end_forward();
  } else {
    schedule_->after_forward(call->unit);
  }
}

void ShardedUnits::watch_inputs(const Call& call, std::span<const at::Tensor> inputs) {
  for (const at::Tensor& input : inputs) {
    const auto node = wrap::at_start_of_backward(input, [units = weak_from_this(), call] {
      if (const auto alive = units.lock()) alive->schedule_->passed_input(*call);
    });
    if (node) call->inputs.push_back(*node);
  }
}

void ShardedUnits::watch_outputs(const Call& call, std::span<const at::Tensor> outputs) {
  for (const at::Tensor& output : outputs) {
    const auto made_by = std::make_shared<wrap::GraphNode>();
    const auto node = wrap::at_start_of_backward(output, [units = weak_from_this(), call, made_by] {
      const auto alive = units.lock();
      if (!alive) return;
      alive->enter_backward();
      alive->schedule_->reached_output(call, *made_by);
    });
    if (node) *made_by = *node;
  }
}

void ShardedUnits::enter_backward() {
  const bool creates_graph = wrap::current_backward_creates_graph();
  if (schedule_->is_in_backward()) {
    creates_graph_ &= creates_graph;
    return;
  }
  schedule_->begin_backward();
  is_reduced_ = false;
  creates_graph_ = creates_graph;
  const auto on_failure = [units = weak_from_this()] {
    if (const auto alive = units.lock()) alive->schedule_->abandon();
  };
  // end_backward() frees units, but the functions that the reducer queues for the end of the
  // backward still read whole gradients. Queueing it from inside of a queued function lets it run
  // after them.
  wrap::at_end_of_backward(
      [units = weak_from_this(), on_failure] {
        wrap::at_end_of_backward(
            [units] {
              if (const auto alive = units.lock()) alive->end_backward(alive->creates_graph_);
            },
            on_failure);
      },
      on_failure);
}

void ShardedUnits::end_backward(bool creates_graph) {
  const bool is_reduced = is_reduced_;
  schedule_->end_backward({.is_reduced = is_reduced, .creates_graph = creates_graph});
  if (is_reduced) end_reduction();
}

void ShardedUnits::end_reduction() {
  is_reduced_ = false;
  schedule_->end_reduction();
}

}  // namespace cadre::parallel
