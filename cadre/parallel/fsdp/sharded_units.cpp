#include "cadre/parallel/fsdp/sharded_units.h"

#include <ATen/core/grad_mode.h>

#include <utility>

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
  if (schedule_->is_in_backward()) return;
  schedule_->begin_backward();
  is_reduced_ = false;
  const bool creates_graph = wrap::current_backward_creates_graph();
  const auto on_failure = [units = weak_from_this()] {
    if (const auto alive = units.lock()) alive->schedule_->abandon();
  };
  // end_backward() frees units, but the functions that the reducer queues for the end of the
  // backward still read whole gradients. Queueing it from inside of a queued function lets it run
  // after them.
  wrap::at_end_of_backward(
      [units = weak_from_this(), creates_graph, on_failure] {
        wrap::at_end_of_backward(
            [units, creates_graph] {
              if (const auto alive = units.lock()) alive->end_backward(creates_graph);
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
