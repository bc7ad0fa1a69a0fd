// What tests of failures in training share: the rank that is killed or stopped by its own hand, how
// soon the others must say so, and a replica group to step in from.
//
// Threads: as the group's. Blocking: as the group's; disturb_self() does not return. Lifetime: a
// ForwardingReplicas keeps the group. Errors: those of the group. For tests only.
#pragma once

#include <signal.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <memory>
#include <string>

#include "cadre/wrap/replica_group.h"
#include "tests/process/job.h"

namespace cadre::testing {

inline constexpr int kVictim = 1;
inline constexpr Duration kStopTimeout = std::chrono::seconds(2);
// After the signal, and after the deadline when the victim is only stopped: what is promised.
inline constexpr Duration kLimit = std::chrono::seconds(2);

// What the victim does to itself; the moment just before is kept in a file.
[[noreturn]] inline void disturb_self(RankContext& context, int signal,
                                      const std::string& moment_file) {
  std::ofstream(moment_file) << context.system.now().ns;
  ::raise(signal);
  // A stopped process that somebody continues must not take part again.
  throw Error(ErrorCode::kInternal, "the victim goes on");
}

inline TimePoint read_moment(const std::string& moment_file) {
  TimePoint moment;
  std::ifstream(moment_file) >> moment.ns;
  return moment;
}

// Passes everything on; a test overrides the call that it watches.
class ForwardingReplicas : public ReplicaGroup {
 public:
  explicit ForwardingReplicas(const ProcessGroup& group) : real_(make_replica_group(group)) {}

  Rank rank() const override { return real_->rank(); }
  int world_size() const override { return real_->world_size(); }
  at::Tensor empty_flat(int64_t numel, at::ScalarType dtype) override {
    return real_->empty_flat(numel, dtype);
  }
  std::function<void()> all_reduce_async(const at::Tensor& tensor, ReduceOp op) override {
    return real_->all_reduce_async(tensor, op);
  }
  void all_reduce(const at::Tensor& tensor, ReduceOp op) override { real_->all_reduce(tensor, op); }
  void broadcast(const at::Tensor& tensor, Rank root) override { real_->broadcast(tensor, root); }
  void all_gather(const at::Tensor& output, const at::Tensor& input) override {
    real_->all_gather(output, input);
  }

 private:
  const std::shared_ptr<ReplicaGroup> real_;
};

}  // namespace cadre::testing
