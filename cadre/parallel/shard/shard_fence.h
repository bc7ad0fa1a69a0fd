// Separates the phases in which ranks read each other's mapped shards from the phases in which
// owners write them. Every FlatParameters of ShardForm::kMapped has a fence.
//
// Threads: as FlatParameters. Blocking: agree_on_step(), begin_update(), and a use of parameters
// after an update, until the group's deadline. Lifetime: does not own the FlatParameters, which may
// be destroyed in any order. Errors: those of the group; kInvalidArgument for an update inside of
// an update, and for one whose FlatParameters are all destroyed; kCorruption if a rank was lost, or
// its step threw, while it wrote its shards, so that they may be half written. After that the
// parameters can no longer be used: resume from the last snapshot. Source: the fence and the access
// epochs of MPI's one-sided communication, and sequence locks.
//
//   all ranks read --begin_update()--> owners write --end_update()--> all ranks read
//
// A rank calls begin_update() when its last pass over the units has ended, of whatever kind that
// pass was. The call protects this rank's parameters from use, and waits until all ranks have
// called it. The end of a reduction does not show that a rank reads no more, because a forward
// without grad may follow. From begin_update() on the rank's version is odd, until end_update().
// That call signals the other ranks and does not wait; the next use of parameters waits for the
// signals of the others. So an update costs one synchronisation before the writes and one after
// them, for all units together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/group/symmetric_tensor.h"
#include "cadre/tensor/hooks/located_group.h"
#include "cadre/tensor/optim/optimizer_options.h"

namespace torch::optim {
class OptimizerParamGroup;
}

namespace cadre::shard {

class FlatParameters;

class CADRE_EXPORT ShardFence {
 public:
  ShardFence() = default;
  // `ranks` are the ranks that step together, for example those of several replicas. The default
  // are the ranks of the units.
  explicit ShardFence(const ProcessGroup& ranks) : ranks_(ranks) {}
  ShardFence(const ShardFence&) = delete;
  ShardFence& operator=(const ShardFence&) = delete;

  struct Step {
    std::string optimizer;  // the name of the optimizer in messages
    int64_t number;         // counts the optimizer's steps from 1
    const std::vector<torch::optim::OptimizerParamGroup>& groups;
    std::function<int64_t(const at::Tensor& leaf)> state_mark_of;  // optim_state::mark_of_state()
  };
  // Called before the update of an optimizer. Throws on all ranks, before anything is written,
  // unless the ranks have the same groups, options and states of the shards, and no stepped shard
  // has, on any rank, a gradient that waits for its reduction. Tensors in the groups that are no
  // shards are not compared. Collective.
  void agree_on_step(const Step& step);
  // Runs `check`. If it throws on one rank, all ranks throw that error. But while the fence has no
  // units and was made without ranks, only this rank throws. Collective. `call` is the name of the
  // program's call in the error, as static text.
  void check_on_all(const char* call, const std::function<void()>& check) const;

  // Covers all FlatParameters made with this fence; every rank makes the same calls. Between the
  // two this rank may write its shards, and no parameter may be used. FencedUpdate makes the calls.
  // Gathered parameters become stale, without communication.
  void begin_update();
  void end_update();
  // Called instead of end_update() if the step has thrown: shards that others map are lost.
  void abandon_update(const std::string& reason) noexcept;
  bool is_in_update() const { return is_writing_; }
  // Number of completed updates.
  uint64_t num_updates() const { return num_updates_; }
  // Sets a check that runs before the gradient of a shard of these FlatParameters is read; it
  // throws if the gradient may not be read. Null: no check. The objects that `check` uses must
  // outlive it.
  void set_gradient_check(std::function<void(const at::Tensor& shard)> check) {
    gradient_check_ = std::move(check);
  }
  bool has_gradient_check() const { return gradient_check_ != nullptr; }
  void check_gradient(const at::Tensor& shard) const {
    if (gradient_check_) gradient_check_(shard);
  }
  // Returns the ranks that step together; null while they are not known.
  const ProcessGroup* stepping_ranks() const;

 private:
  friend class FlatParameters;

  void add(FlatParameters& unit);
  void remove(const FlatParameters& unit);
  // Called before a unit is mapped. Returns whether units can be mapped. Collective.
  bool prepare(const wrap::LocatedGroup& group);
  // Waits until the owners have ended the last update.
  void wait_for_owners();

  void meet(const std::optional<Error>& problem);
  void withdraw();
  void check_versions();
  Error with_half_written(const Error& error);
  uint64_t version_of(int rank) const;
  void publish_version(uint64_t version);
  std::string where() const;
  std::string names() const;

  std::vector<FlatParameters*> units_;
  bool had_units_ = false;
  std::optional<ProcessGroup> ranks_;
  std::function<void(const at::Tensor&)> gradient_check_;
  optim_state::UncomparedOptions uncompared_options_;
  std::optional<wrap::LocatedGroup> group_;  // nullopt if there are no mapped units
  // A page of each rank, which begins with its version; and all pages.
  std::optional<SymmetricTensor> versions_;
  at::Tensor pages_;
  uint64_t num_updates_ = 0;
  bool is_writing_ = false;
  bool is_awaiting_ = false;  // the next use of parameters waits for the signals of the last update
  std::optional<Error> failure_;
};

// An update of fences that lasts as long as this object. An exception before finish() abandons it.
// Made on all ranks.
class CADRE_EXPORT FencedUpdate {
 public:
  explicit FencedUpdate(const std::shared_ptr<ShardFence>& fence);
  // Begins the updates of several fences in this order, on all ranks; each once, null ones are
  // skipped.
  explicit FencedUpdate(std::span<const std::shared_ptr<ShardFence>> fences);
  ~FencedUpdate();
  FencedUpdate(const FencedUpdate&) = delete;
  FencedUpdate& operator=(const FencedUpdate&) = delete;

  // Ends the update; without this call the destructor abandons it.
  void finish();

 private:
  void abandon() noexcept;

  std::vector<std::shared_ptr<ShardFence>> fences_;  // the fences whose updates have begun
};

}  // namespace cadre::shard
