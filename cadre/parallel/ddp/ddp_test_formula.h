// A group of replicas whose peers are a formula, for tests of one rank.
//
// Threads: one. Blocking: never. It reduces only in the wait of an operation, so a caller that
// reads before it waits sees unreduced values.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/log.h"
#include "cadre/wrap/replica_group.h"

namespace cadre::testing {

// Keeps warnings and errors. Threads: any.
class LogLines : public LogSink {
 public:
  void write(LogLevel level, std::string_view component, std::string_view message) override {
    if (level < LogLevel::kWarning) return;
    const std::lock_guard lock(mutex_);
    lines_.push_back(std::string(component) + " " + std::string(message));
  }
  std::vector<std::string> get() const {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

// Rank 0 of `world_size`. Rank r's gradients are r + 1 times this rank's; its flags and used
// parameters are this rank's unless said otherwise.
class FormulaReplicas : public ReplicaGroup {
 public:
  explicit FormulaReplicas(int world_size) : world_size_(world_size) {}

  // The mean of all ranks' gradients over this rank's.
  double mean_factor() const { return (world_size_ + 1) / 2.0; }

  Rank rank() const override { return 0; }
  int world_size() const override { return world_size_; }
  at::Tensor empty_flat(int64_t numel, at::ScalarType dtype) override {
    ++num_allocated;
    return at::zeros({numel}, dtype);
  }
  std::function<void()> all_reduce_async(const at::Tensor& tensor, ReduceOp op) override {
    log.push_back("all_reduce " + std::to_string(tensor.numel()));
    return [this, tensor, op] {
      ++num_waited;
      const at::NoGradGuard no_grad;
      if (tensor.scalar_type() == at::kInt) {
        if (peer_counts.defined()) {
          tensor.add_(peer_counts);
        } else {
          tensor.mul_(world_size_);
          for (const int64_t place : {1, 2, 3, 4}) {  // of the ranks' positions and wrappers
            const at::Tensor counts = tensor.narrow(0, -place * world_size_, world_size_);
            counts.fill_(counts[0] / world_size_);
          }
        }
      } else if (tensor.scalar_type() == at::kLong) {
        const at::Tensor peers =
            peer_samples ? at::full_like(tensor, *peer_samples) : tensor * (world_size_ - 1);
        if (peer_samples) peers.narrow(0, 1, 2).zero_();  // no samples: see sample_weight.cpp
        tensor.add_(peers);
      } else {
        if (flag_of_peers != 0) tensor[-1] += flag_of_peers;
        tensor.mul_(op == ReduceOp::kAvg ? mean_factor() : mean_factor() * world_size_);
      }
    };
  }
  void all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    all_reduce_async(tensor, op)();
  }
  void broadcast(const at::Tensor& tensor, Rank) override {
    log.push_back("broadcast " + std::to_string(tensor.numel()));
  }
  void all_gather(const at::Tensor& output, const at::Tensor& input) override {
    output.copy_(input.repeat({world_size_}));
  }

  LogSink& log_sink() override { return lines; }

  std::vector<std::string> log;  // of operations
  LogLines lines;
  int num_allocated = 0;  // buckets
  int num_waited = 0;
  at::Tensor peer_counts;  // of the int32 reduction; undefined: as this rank
  // Of all peers together; otherwise each has as many as this rank.
  std::optional<int64_t> peer_samples;
  double flag_of_peers = 0;  // added to the last element of each floating-point reduction

 private:
  int world_size_;
};

}  // namespace cadre::testing
