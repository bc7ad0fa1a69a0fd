// The group that tests of wrappers use: over a real group, or over peers that are a formula. In one
// place, on_call, a test may count, drop, change, delay or fail any call.
//
// Threads: as ReplicaGroup. Blocking: as the real group; never with a formula. Lifetime: keeps the
// real group or the formula. Errors: those of the real group and of on_call. For tests only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/log_lines.h"
#include "cadre/wrap/replica_group.h"

namespace cadre::testing {

// The other ranks of rank 0, for tests of one rank: rank r's floating-point values are r + 1 times
// those of rank 0, and its integers are rank 0's. A wrapper that puts more into its messages than
// gradients derives from this.
class PeersFormula {
 public:
  explicit PeersFormula(int world_size) : world_size_(world_size) {}
  virtual ~PeersFormula() = default;

  int world_size() const { return world_size_; }
  // The mean of all ranks' values over this rank's.
  double mean_factor() const { return (world_size_ + 1) / 2.0; }
  // In place: this rank's values become those of all ranks, reduced.
  virtual void reduce(const at::Tensor& tensor, ReduceOp op) const {
    if (tensor.is_floating_point()) {
      tensor.mul_(op == ReduceOp::kAvg ? mean_factor() : mean_factor() * world_size_);
    } else if (op == ReduceOp::kSum) {
      tensor.mul_(world_size_);
    }
  }

 private:
  int world_size_;
};

// A call of the wrapper, which on_call may look at and change before it passes it on.
struct GroupCall {
  enum class Kind : uint8_t {
    kEmptyFlat,
    kMapParts,
    kAllReduce,
    kAllReduceAsync,
    kBroadcast,
    kAllGather,
    kAllGatherAsync,
    kReduceScatterAsync,
  };

  bool is_all_reduce() const { return kind == Kind::kAllReduce || kind == Kind::kAllReduceAsync; }
  bool is_all_gather() const { return kind == Kind::kAllGather || kind == Kind::kAllGatherAsync; }
  // Of gradients, and not of what the ranks agree on in integers.
  bool is_reduction_of_values() const {
    return (is_all_reduce() || kind == Kind::kReduceScatterAsync) && tensor.is_floating_point();
  }

  Kind kind;
  int64_t number;          // of this group's calls, from 1
  at::Tensor tensor = {};  // reduced or sent; not of kEmptyFlat or kMapParts
  // Of a gather or kReduceScatterAsync; of kEmptyFlat, when it was passed on.
  at::Tensor output = {};
  ReduceOp op = ReduceOp::kSum;     // of a reduction
  Rank root = 0;                    // of kBroadcast
  std::function<void()> pass_on{};  // to the real group or the formula, as the call is by then
  // Of an asynchronous call: what the wrapper waits with. pass_on() sets it; a formula computes the
  // result in it, so a wrapper that reads before it waits sees what was there before.
  std::function<void()> wait = [] {};
};

// Passes an asynchronous call on in its wait only, as a slow group does.
inline void delay(GroupCall& call) {
  call.wait = [&call] {
    call.pass_on();
    call.wait();
  };
}

class FakeReplicas final : public ReplicaGroup {
 public:
  explicit FakeReplicas(std::shared_ptr<ReplicaGroup> real) : real_(std::move(real)) {}
  explicit FakeReplicas(const ProcessGroup& group) : FakeReplicas(make_replica_group(group)) {}
  explicit FakeReplicas(std::shared_ptr<const PeersFormula> formula)
      : formula_(std::move(formula)) {}

  // Runs in place of each call, and passes it on unless it is to be dropped:
  //   count   ++n; call.pass_on();
  //   drop    return;
  //   change  call.op = ReduceOp::kSum; call.pass_on();
  //   delay   delay(call);
  //   fail    throw Error(...), or for the wait: call.wait = [] { throw Error(...); };
  std::function<void(GroupCall& call)> on_call = [](GroupCall& call) { call.pass_on(); };

  Rank rank() const override { return real_ ? real_->rank() : Rank(0); }
  int world_size() const override { return real_ ? real_->world_size() : formula_->world_size(); }
  uint64_t num_operations() const override { return real_ ? real_->num_operations() : 0; }
  at::Tensor empty_flat(int64_t numel, at::ScalarType dtype) override {
    ++num_allocated;
    GroupCall call = begin(GroupCall::Kind::kEmptyFlat);
    call.pass_on = [this, &call, numel, dtype] {
      call.output = real_ ? real_->empty_flat(numel, dtype) : at::zeros({numel}, dtype);
    };
    on_call(call);
    return call.output;
  }
  // Peers that are a formula share no memory.
  std::optional<MappedParts> map_parts(int64_t numel, at::ScalarType dtype) override {
    GroupCall call = begin(GroupCall::Kind::kMapParts);
    std::optional<MappedParts> parts;
    call.pass_on = [this, &parts, numel, dtype] {
      if (real_) parts = real_->map_parts(numel, dtype);
    };
    on_call(call);
    return parts;
  }
  std::function<void()> all_reduce_async(const at::Tensor& tensor, ReduceOp op) override {
    const auto call = std::make_shared<GroupCall>(begin(GroupCall::Kind::kAllReduceAsync));
    log.push_back("all_reduce " + std::to_string(tensor.numel()));
    call->tensor = tensor;
    call->op = op;
    return start(call);
  }
  void all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    GroupCall call = begin(GroupCall::Kind::kAllReduce);
    log.push_back("all_reduce " + std::to_string(tensor.numel()));
    ++num_waited;
    call.tensor = tensor;
    call.op = op;
    call.pass_on = [this, &call] {
      if (real_) {
        real_->all_reduce(call.tensor, call.op);
      } else {
        reduce(call.tensor, call.op);
      }
    };
    on_call(call);
  }
  void broadcast(const at::Tensor& tensor, Rank root) override {
    GroupCall call = begin(GroupCall::Kind::kBroadcast);
    log.push_back("broadcast " + std::to_string(tensor.numel()));
    call.tensor = tensor;
    call.root = root;
    call.pass_on = [this, &call] {
      if (real_) real_->broadcast(call.tensor, call.root);
    };
    on_call(call);
  }
  void all_gather(const at::Tensor& output, const at::Tensor& input) override {
    GroupCall call = begin(GroupCall::Kind::kAllGather);
    log.push_back("all_gather " + std::to_string(input.numel()));
    call.tensor = input;
    call.output = output;
    call.pass_on = [this, &call] {
      if (real_) {
        real_->all_gather(call.output, call.tensor);
      } else {
        repeat(call);
      }
    };
    on_call(call);
  }
  std::function<void()> all_gather_async(const at::Tensor& output,
                                         const at::Tensor& input) override {
    const auto call = std::make_shared<GroupCall>(begin(GroupCall::Kind::kAllGatherAsync));
    log.push_back("all_gather " + std::to_string(input.numel()));
    call->tensor = input;
    call->output = output;
    return start(call);
  }
  std::function<void()> reduce_scatter_async(const at::Tensor& output, const at::Tensor& input,
                                             ReduceOp op) override {
    const auto call = std::make_shared<GroupCall>(begin(GroupCall::Kind::kReduceScatterAsync));
    log.push_back("reduce_scatter " + std::to_string(output.numel()));
    call->tensor = input;
    call->output = output;
    call->op = op;
    return start(call);
  }
  const ProcessGroup* process_group() const override {
    return real_ ? real_->process_group() : nullptr;
  }
  LogSink& log_sink() override { return real_ ? real_->log_sink() : lines; }

  // Of collectives, "all_reduce 12" with the number of elements of this rank: a gather's input, the
  // output of a reduce_scatter.
  std::vector<std::string> log;
  int num_allocated = 0;  // flat buffers
  int num_waited = 0;     // reductions and asynchronous calls that have ended
  LogLines lines;         // what a wrapper over a formula has logged

 private:
  GroupCall begin(GroupCall::Kind kind) { return {.kind = kind, .number = ++num_calls_}; }
  std::function<void()> start(const std::shared_ptr<GroupCall>& call) {
    call->pass_on = [this, call = call.get()] {
      call->wait = real_ ? start_real(*call) : [this, call = *call] { compute(call); };
    };
    on_call(*call);
    return [this, call] {
      ++num_waited;
      const auto wait = call->wait;  // a copy, because a delayed call sets another one
      wait();
    };
  }
  std::function<void()> start_real(const GroupCall& call) {
    switch (call.kind) {
      case GroupCall::Kind::kAllGatherAsync:
        return real_->all_gather_async(call.output, call.tensor);
      case GroupCall::Kind::kReduceScatterAsync:
        return real_->reduce_scatter_async(call.output, call.tensor, call.op);
      default:
        return real_->all_reduce_async(call.tensor, call.op);
    }
  }
  // What an asynchronous call would bring to rank 0.
  void compute(const GroupCall& call) const {
    const at::NoGradGuard no_grad;
    switch (call.kind) {
      case GroupCall::Kind::kAllGatherAsync:
        return repeat(call);
      case GroupCall::Kind::kReduceScatterAsync: {
        const at::Tensor part = call.tensor.narrow(0, 0, call.output.numel()).clone();
        formula_->reduce(part, call.op);
        call.output.copy_(part);
        return;
      }
      default:
        formula_->reduce(call.tensor, call.op);
    }
  }
  // Of a gather from ranks that all have what rank 0 has.
  void repeat(const GroupCall& call) const {
    const at::NoGradGuard no_grad;
    call.output.copy_(call.tensor.repeat({world_size()}));
  }
  void reduce(const at::Tensor& tensor, ReduceOp op) const {
    const at::NoGradGuard no_grad;
    formula_->reduce(tensor, op);
  }

  std::shared_ptr<ReplicaGroup> real_;  // or
  std::shared_ptr<const PeersFormula> formula_;
  int64_t num_calls_ = 0;
};

}  // namespace cadre::testing
