// The group of one wrapper, whose errors say where in the wrapper's step this rank was.
//
// Threads: as the group. Blocking: as the group. Lifetime: keeps the group alive.
// Errors: the group's. When the ranks called different operations, the message begins with the
// wrapper, its module, this rank, and the part of the step that the operation belongs to: the
// program has called none of these operations by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "cadre/wrap/replica_group.h"

namespace cadre {

class LocatedReplicas final : public ReplicaGroup {
 public:
  struct Owner {
    std::string wrapper;  // "DistributedDataParallel"
    std::string module;   // "Net"
  };
  LocatedReplicas(std::shared_ptr<ReplicaGroup> group, Owner owner)
      : group_(std::move(group)), owner_(std::move(owner)) {}

  // A part of the wrapper's step, in its own words: "the backward() after its forward {}", where
  // `number` takes the place of {}. The text is not copied: a literal.
  struct Place {
    std::string_view text = "its construction";
    int64_t number = 0;
  };
  // What the operations from here on belong to.
  void enter(const Place& place) { place_ = place; }

  Rank rank() const override { return group_->rank(); }
  int world_size() const override { return group_->world_size(); }
  uint64_t num_operations() const override { return group_->num_operations(); }
  const std::string& module_name() const { return owner_.module; }
  at::Tensor empty_flat(int64_t numel, at::ScalarType dtype) override;
  std::optional<MappedParts> map_parts(int64_t numel, at::ScalarType dtype) override;
  std::function<void()> all_reduce_async(const at::Tensor& tensor, ReduceOp op) override;
  void all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  void broadcast(const at::Tensor& tensor, Rank root) override;
  void all_gather(const at::Tensor& output, const at::Tensor& input) override;
  std::function<void()> all_gather_async(const at::Tensor& output,
                                         const at::Tensor& input) override;
  std::function<void()> reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp op) override;
  const ProcessGroup* process_group() const override { return group_->process_group(); }
  LogSink& log_sink() override { return group_->log_sink(); }

 private:
  template <typename Operation>
  auto run(Operation operation) const;
  // `start` issues an operation and returns what waits for it.
  template <typename Start>
  std::function<void()> run_async(Start start) const;

  std::shared_ptr<ReplicaGroup> group_;
  Owner owner_;
  Place place_;
};

}  // namespace cadre
