// Turns calls of the units of one wrapped model, passes of backwards over them, and gradients into
// the events of a UnitSchedule.
//
// Threads: as UnitSchedule. Blocking: as UnitSchedule. Lifetime: graphs and units hold weak
// references. Errors: as UnitSchedule, out of forward() and backward().
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
  // trained: distinct leaves, by the numbers in UnitSchedule::Unit::parameters. precisions: by
  // unit.
  ShardedUnits(std::unique_ptr<UnitSchedule> schedule, const std::vector<at::Tensor>& trained,
               std::vector<ShardPrecision> precisions);

  UnitSchedule& schedule() { return *schedule_; }
  const ShardPrecision& precision(size_t unit) const { return precisions_[unit]; }

  // Called when gradients are being reduced, in the backward that runs or outside of one. Outside,
  // end_reduction() ends the reduction.
  void set_reduced() {
    is_reduced_ = true;
    schedule_->count_launch();
  }
  void end_reduction();

  using Call = std::shared_ptr<UnitSchedule::Call>;
  // The calls for the root (unit 0) also begin and end the forward.
  Call before_forward(size_t unit, std::span<const at::Tensor> inputs);
  void after_forward(const Call& call, std::span<const at::Tensor> outputs);

 private:
  // Queues the end of the backward that runs, if this is its first event.
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
