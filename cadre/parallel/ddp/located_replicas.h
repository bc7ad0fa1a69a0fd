// The group of one wrapper, whose errors say where in the wrapper's step this rank was.
//
// Threads: as the group. Blocking: as the group. Lifetime: keeps the group alive.
// Errors: the group's. When the ranks called different operations, the message begins with the
// module, this rank, and which forward or backward of the wrapper the operation belongs to: the
// program has called none of these operations by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cadre/buckets/replica_group.h"

namespace cadre {

class LocatedReplicas final : public ReplicaGroup {
 public:
  LocatedReplicas(std::shared_ptr<ReplicaGroup> group, std::string module_name)
      : group_(std::move(group)), module_name_(std::move(module_name)) {}

  enum class Place : uint8_t { kConstructor, kForward, kBackward, kMean };
  // What the operations from here on belong to; entering kForward counts a forward.
  void enter(Place place) {
    place_ = place;
    if (place == Place::kForward) ++num_forwards_;
  }

  Rank rank() const override { return group_->rank(); }
  int world_size() const override { return group_->world_size(); }
  uint64_t num_operations() const override { return group_->num_operations(); }
  const std::string& module_name() const { return module_name_; }
  at::Tensor empty_flat(int64_t numel, at::ScalarType dtype) override;
  std::function<void()> all_reduce_async(const at::Tensor& tensor, ReduceOp op) override;
  void all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  void broadcast(const at::Tensor& tensor, Rank root) override;
  void all_gather(const at::Tensor& output, const at::Tensor& input) override;
  LogSink& log_sink() override { return group_->log_sink(); }

 private:
  std::string place() const;
  template <typename Operation>
  auto run(Operation operation) const;

  std::shared_ptr<ReplicaGroup> group_;
  std::string module_name_;
  Place place_ = Place::kConstructor;
  int64_t num_forwards_ = 0;
};

}  // namespace cadre
