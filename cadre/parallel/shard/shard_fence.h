// Separates the phases in which ranks read each other's mapped shards from the phases in which
// owners write them. FlatParameters whose shards are written by the same updates share a fence;
// these FlatParameters are called units below.
//
// Threads: as FlatParameters. Blocking: agree_on_step(), begin_update(), and the first use of
// parameters after an update wait until the group's deadline. Lifetime: does not own the units,
// which may be destroyed in any order. Errors: those of the group; kInvalidArgument for an update
// inside of another one, and for an update after all units were destroyed; kCorruption if a rank
// was lost, or its step threw, while it wrote its shards, which may then be half written. After
// kCorruption the parameters can no longer be used: resume from the last snapshot. Source: the
// fence and the access epochs of MPI's one-sided communication, and sequence locks.
//
//   all ranks read --begin_update()--> owners write --end_update()--> all ranks read
//
// A rank calls begin_update() after its last forward or backward before the step. begin_update()
// marks this rank's parameters as stale, so that an access to them throws, and waits until all
// ranks have called it. The reduction of the gradients cannot serve as this barrier, because a rank
// may run a forward without grad after it. Each rank publishes a version, which is odd between
// begin_update() and end_update(). end_update() signals the other ranks and does not wait; the next
// use of parameters waits for the signals of all other ranks. So an update costs one
// synchronisation before the writes and one after them, for all units together.
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
  // ranks: all ranks that call the optimizer's step() together, for example the ranks of several
  // replicas. The default is the group of the units.
  explicit ShardFence(const ProcessGroup& ranks) : ranks_(ranks) {}
  ShardFence(const ShardFence&) = delete;
  ShardFence& operator=(const ShardFence&) = delete;

  struct Step {
    std::string optimizer;  // the name of the optimizer in messages
    int64_t number;         // counts the optimizer's steps from 1
    const std::vector<torch::optim::OptimizerParamGroup>& groups;
    // See optim_state::mark_of_state().
    std::function<int64_t(const at::Tensor& leaf)> state_mark_of;
  };
  // Called before an optimizer updates the shards. Throws on all ranks, before a shard is written,
  // if parameter groups, options or optimizer states of the shards differ between the ranks, or if
  // a gradient is not reduced to its shard yet on any rank. Does not compare tensors in the groups
  // that are not shards. Collective.
  void agree_on_step(const Step& step);
  // Runs `check`. If it throws on one rank, all ranks throw that error. Collective. If the fence
  // has no units and was made without `ranks`, runs `check` only on this rank. call: the name of
  // the called function for the error, as static text.
  void check_on_all(const char* call, const std::function<void()>& check) const;

  // This rank may write its shards of all units between begin_update() and end_update(), and must
  // not use a parameter meanwhile. All ranks make the calls together; FencedUpdate does it for
  // them. If the units are not mapped, the calls only mark the parameters as stale, without
  // communication.
  void begin_update();
  void end_update();
  // Called instead of end_update() if the step has thrown. Mapped shards are then unusable on all
  // ranks.
  void abandon_update(const std::string& reason) noexcept;
  bool is_in_update() const { return is_writing_; }
  // Number of completed updates.
  uint64_t num_updates() const { return num_updates_; }
  // Sets a function that check_gradient() calls before the gradient of a unit's shard is read, and
  // that throws if the gradient may not be read. Null: no check. The objects that `check` refers to
  // must outlive the fence, or the next call of this function.
  void set_gradient_check(std::function<void(const at::Tensor& shard)> check) {
    gradient_check_ = std::move(check);
  }
  bool has_gradient_check() const { return gradient_check_ != nullptr; }
  void check_gradient(const at::Tensor& shard) const {
    if (gradient_check_) gradient_check_(shard);
  }
  // Returns the ranks that call the optimizer's step() together; null if the fence has neither
  // `ranks` nor units.
  const ProcessGroup* stepping_ranks() const;

 private:
  friend class FlatParameters;

  void add(FlatParameters& unit);
  void remove(const FlatParameters& unit);
  // A unit calls this before it maps its shards. Returns whether the ranks can map each other's
  // memory. Collective.
  bool prepare(const wrap::LocatedGroup& group);
  // Waits until all ranks have ended the last update.
  void wait_for_owners();

  void communicate(const std::function<void()>& call);
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
  // The group of the mapped units; nullopt if there are none.
  std::optional<wrap::LocatedGroup> group_;
  // One page of each rank, which begins with that rank's version; pages_ maps the pages of all
  // ranks.
  std::optional<SymmetricTensor> versions_;
  at::Tensor pages_;
  uint64_t num_updates_ = 0;
  bool is_writing_ = false;
  bool is_awaiting_ = false;  // the signals of the last update have not been awaited yet
  std::optional<Error> failure_;
};

// An update of one or several fences: the constructor calls begin_update(), finish() calls
// end_update(). If the object is destroyed before finish(), by an exception for example, it
// abandons the update. The constructor and finish() are collective.
class CADRE_EXPORT FencedUpdate {
 public:
  explicit FencedUpdate(const std::shared_ptr<ShardFence>& fence);
  // Begins the updates of the fences in the order of the list, which must be the same on all ranks.
  // Skips null pointers and repeated fences.
  explicit FencedUpdate(std::span<const std::shared_ptr<ShardFence>> fences);
  ~FencedUpdate();
  FencedUpdate(const FencedUpdate&) = delete;
  FencedUpdate& operator=(const FencedUpdate&) = delete;

  // Ends the updates.
  void finish();

 private:
  void abandon() noexcept;

  // The fences whose updates have begun and not ended.
  std::vector<std::shared_ptr<ShardFence>> fences_;
};

}  // namespace cadre::shard
