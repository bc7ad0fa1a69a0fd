// Connects autograd with a UnitSchedule: hooks report to it when a forward of a unit begins and
// ends, when a backward reaches the unit's outputs and inputs, and when gradients are computed.
//
// Threads and blocking: as UnitSchedule. Lifetime: autograd graphs and units hold weak references.
// Errors: forward() and backward() throw those of UnitSchedule.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/fsdp/unit_schedule.h"
#include "cadre/tensor/hooks/autograd_hooks.h"

namespace cadre::parallel {

class ShardedUnits : public std::enable_shared_from_this<ShardedUnits> {
 public:
  // trained: the trained parameters, distinct leaves; UnitSchedule::Unit::parameters are indices
  // into this list. precisions: one for each unit.
  ShardedUnits(std::unique_ptr<UnitSchedule> schedule, const std::vector<at::Tensor>& trained,
               std::vector<ShardPrecision> precisions);

  UnitSchedule& schedule() { return *schedule_; }
  const ShardPrecision& precision(size_t unit) const { return precisions_[unit]; }

  // Called when the reduction of a bucket of gradients begins, in a backward or outside of one. If
  // it is outside of a backward, end_reduction() must follow.
  void set_reduced() {
    is_reduced_ = true;
    schedule_->count_launch();
  }
  void end_reduction();

  using Call = std::shared_ptr<UnitSchedule::Call>;
  // Called before and after the forward of a unit. The calls for the root (unit 0) also begin and
  // end the forward of the whole model.
  Call before_forward(size_t unit, std::span<const at::Tensor> inputs);
  void after_forward(const Call& call, std::span<const at::Tensor> outputs);

 private:
  // Called at each event of a backward. At the first event it queues end_backward() for the end of
  // the backward.
  void enter_backward();
  void end_backward(bool creates_graph);
  void watch_inputs(const Call& call, std::span<const at::Tensor> inputs);
  void watch_outputs(const Call& call, std::span<const at::Tensor> outputs);

  std::unique_ptr<UnitSchedule> schedule_;
  std::vector<ShardPrecision> precisions_;
  bool is_reduced_ = false;
  std::unique_ptr<wrap::AccumulationHooks> hooks_;  // is null if no parameter is trained
};

}  // namespace cadre::parallel
