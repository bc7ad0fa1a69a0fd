// Connects libtorch with a UnitSchedule: it learns which operations use parameters of a unit, when
// a forward of a ShardUnit begins and ends, when a backward reaches the unit's outputs and inputs,
// and when gradients are computed.
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
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/hooks/operations/parameter_uses.h"

namespace cadre::parallel {

class ShardedUnits : public wrap::UseObserver, public std::enable_shared_from_this<ShardedUnits> {
 public:
  // trained: the trained parameters, distinct leaves; UnitSchedule::Unit::parameters are indices
  // into this list. precisions: one for each unit.
  ShardedUnits(std::unique_ptr<UnitSchedule> schedule, const std::vector<at::Tensor>& trained,
               std::vector<ShardPrecision> precisions);

  // Lets operations on the parameters of the units, and on the shards, report to this object.
  // parameters[u]: those of unit u.
  void observe(std::vector<std::vector<NamedTensor>> parameters, std::vector<at::Tensor> shards);
  // Throws kInvalidArgument if a parameter was given other memory, so that its use would not be
  // noticed.
  void check_observed() const;
  void begin_use(const Use& use) override;
  void end_use(const Use& use) noexcept override;

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
  void check_frozen(size_t unit) const;
  void end_backward(bool creates_graph);
  void watch_inputs(const Call& call, std::span<const at::Tensor> inputs);
  void watch_outputs(const Call& call, std::span<const at::Tensor> outputs);

  std::unique_ptr<UnitSchedule> schedule_;
  std::vector<ShardPrecision> precisions_;
  std::vector<std::vector<NamedTensor>> parameters_;
  std::vector<std::vector<bool>> is_trained_;  // whether each of them was trained when observed
  std::vector<std::unique_ptr<wrap::ObservedParameters>> observed_;  // one for each unit
  std::unique_ptr<wrap::ObservedParameters> observed_shards_;        // has the number num_units()
  bool is_reduced_ = false;
  // Whether all events of this backward were in grad mode. A recomputation of activations is in
  // grad mode in every backward.
  bool creates_graph_ = false;
  std::unique_ptr<wrap::AccumulationHooks> hooks_;  // is null if no parameter is trained
};

}  // namespace cadre::parallel
