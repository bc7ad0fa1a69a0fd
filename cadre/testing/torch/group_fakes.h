// FakeGroup, a group for tests of wrappers: either a real group whose collectives a test can
// intercept before the engine runs them, or rank 0 of a group whose other ranks a formula computes.
//
// Threads: those of ProcessGroup; on_call runs in the thread that runs the collective, which may be
// the group's own. Blocking: that of the real group; never with a formula. Lifetime: group() and
// on_call may outlive this object. Errors: those of the real group; an exception of on_call fails
// the group. For tests only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/comm/groups/lone_group.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/tensor/group/operands/dtype.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/testing/core/fake_backend.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/core/intercepted_group.h"

namespace cadre::testing {

// Returns a 1-dim tensor over the memory of a collective's input or output.
inline at::Tensor tensor_of(ConstBytes bytes, DType dtype) {
  const auto numel = static_cast<int64_t>(bytes.size() / size_of(dtype));
  return at::from_blob(const_cast<std::byte*>(bytes.data()),  // NOLINT: a tensor is never const
                       {numel}, at::TensorOptions().dtype(to_scalar_type(dtype)));
}

// Computes the contributions of the other ranks when only rank 0 exists: the floating-point values
// of rank r are r + 1 times those of rank 0, and its integers equal those of rank 0. Derive from it
// for a wrapper that exchanges more than gradients.
class PeersFormula : public FormulaPeers {
 public:
  explicit PeersFormula(int world_size) : world_size_(world_size) {}

  int world_size() const { return world_size_; }
  // Returns the mean over all ranks of a floating-point value, divided by this rank's value.
  double mean_factor() const { return (world_size_ + 1) / 2.0; }
  // Replaces the values of rank 0, in place, by the result of the reduction over all ranks.
  virtual void reduce(const at::Tensor& tensor, ReduceOp op) const {
    if (tensor.is_floating_point()) {
      tensor.mul_(op == ReduceOp::kAvg ? mean_factor() : mean_factor() * world_size_);
    } else if (op == ReduceOp::kSum) {
      tensor.mul_(world_size_);
    }
  }

  Status run(const FakeRank& self, const OpContext& op, const Collective& c) override {
    if (!reduces(c.kind)) return FormulaPeers::run(self, op, c);
    const at::NoGradGuard no_grad;
    const at::Tensor output = tensor_of(c.out, c.dtype);
    // This rank is rank 0, so its part of a reduce_scatter is the first one.
    const at::Tensor own = tensor_of(c.in, c.dtype).narrow(0, 0, output.numel());
    if (output.const_data_ptr() != own.const_data_ptr()) output.copy_(own);
    reduce(output, c.reduction.op());
    return {};
  }

 private:
  int world_size_;
};

// An intercepted collective, as on_call gets it before it runs.
class GroupCall {
 public:
  explicit GroupCall(FakeCall& call)
      : kind(call.called),
        number(call.number),
        root(call.collective.root),
        input(tensor_of(call.collective.in, call.collective.dtype)),
        output(tensor_of(call.collective.out, call.collective.dtype)),
        call_(call) {}

  // Returns whether the collective reduces floating-point values (gradients), and not the integers
  // that the ranks compare.
  bool is_reduction_of_values() const { return reduces(kind) && is_of_values(); }
  bool is_of_values() const { return input.is_floating_point(); }
  ReduceOp op() const { return call_.collective.reduction.op(); }
  void reduce_with(ReduceOp op) { call_.collective.reduction = op; }
  // Runs the collective with the real or simulated ranks, including the changes that the test has
  // made to it.
  void pass_on() {
    const at::NoGradGuard no_grad;
    status_ = call_.pass_on();
  }
  Status status() const { return status_; }

  const OpKind kind;
  const uint64_t number;  // counts the group's collectives from 1
  const Rank root;
  // The operands; both have the same memory if the collective is in place.
  const at::Tensor input;
  const at::Tensor output;

 private:
  FakeCall& call_;
  Status status_;
};

class FakeGroup {
  using OnCall = std::function<void(GroupCall& call)>;
  // Shared with the group, which may outlive this object.
  const std::shared_ptr<OnCall> on_call_ =
      std::make_shared<OnCall>([](GroupCall& call) { call.pass_on(); });

 public:
  // Makes a group of all ranks of `real`, which is split from it, so all ranks must construct one.
  // If either group or another group that fails together with `real` fails, all of them fail.
  explicit FakeGroup(const ProcessGroup& real)
      : FakeGroup(split(real.communicator(), {.color = 0, .name = real.name()},
                        real.communicator().system().deadline_in(kDefaultConnectTimeout))) {
    real.communicator().fail_together(*communicator_);
  }
  // Intercepts the collectives of `real` itself. REQUIRES: no operation was issued in `real`.
  explicit FakeGroup(std::shared_ptr<Communicator> real) : communicator_(std::move(real)) {
    intercept(*communicator_, calls_);
    install();
  }
  // Makes rank 0 of a group whose other ranks a formula computes. An asynchronous collective runs
  // only when the caller waits for it or for a later one, so a wrapper that reads a result before
  // it waits reads the old values, and the test detects that.
  explicit FakeGroup(const std::shared_ptr<PeersFormula>& formula) {
    const auto lone = std::make_shared<Lone>();
    CommunicatorOptions options;
    options.backend = fake_backend(formula, calls_);
    lone->group = make_lone_group(lone->system, formula->world_size(), options);
    communicator_ = std::shared_ptr<Communicator>(lone, lone->group.get());
    lone_ = lone.get();
    install();
  }
  FakeGroup(const FakeGroup&) = delete;
  FakeGroup& operator=(const FakeGroup&) = delete;

  // A function that is called instead of each collective. It passes the collective on to the
  // engine, with or without a change, or drops it. Examples of its body:
  //   count   ++n; call.pass_on();
  //   drop    return;
  //   change  call.reduce_with(ReduceOp::kSum); call.pass_on();
  //   delay   delay(call);
  //   fail    throw Error(...);
  // Set it while no operation is pending.
  OnCall& on_call = *on_call_;
  // Passes a collective on after a pause, to simulate a slow network.
  void delay(GroupCall& call) const {
    os::System& system = communicator_->system();
    system.make_waiter()->park(system.deadline_in(std::chrono::milliseconds(5)));
    call.pass_on();
  }

  // Operations of a group with a formula run in the callers' waits only. This call starts the
  // group's progress thread, so that operations also run if no caller waits for them, such as those
  // of a backward that has ended with an exception. The destructor of a wrapper waits for the end
  // of such operations. Has no effect for a real group.
  void begin_threads() const {
    if (lone_ != nullptr) lone_->system.begin_threads();
  }

  ProcessGroup group() const { return ProcessGroup(communicator_); }
  // Returns how many owners the group has besides this object.
  long num_owners() const { return communicator_.use_count() - 1; }

  // Returns the collectives in the order in which they ran, for example "all_reduce(sum, float32 x
  // 12)".
  std::vector<std::string> log() const { return calls_->log(); }
  void clear_log() const { calls_->clear_log(); }
  // Returns how many allocations of symmetric memory are in the log.
  int64_t num_allocated() const {
    return std::ranges::count_if(
        log(), [](const std::string& call) { return call.starts_with("allocate_symmetric"); });
  }

 private:
  // A System that delays the start of progress threads until begin_threads() or their join(), so
  // that operations run in the callers' waits.
  class CallersRunAll final : public ForwardingSystem {
   public:
    using ForwardingSystem::ForwardingSystem;
    std::unique_ptr<os::Thread> spawn(std::string name, std::function<void()> body) override {
      if (have_begun_ || name != "cadre-progress") {
        return inner_.spawn(std::move(name), std::move(body));
      }
      deferred_.push_back(std::make_shared<Deferred>(inner_, std::move(body)));
      return std::make_unique<Handle>(deferred_.back());
    }
    void begin_threads() {
      have_begun_ = true;
      for (const auto& deferred : deferred_) deferred->begin();
    }

   private:
    class Deferred {
     public:
      Deferred(os::System& system, std::function<void()> body)
          : system_(system), body_(std::move(body)) {}
      void begin() {
        if (thread_ == nullptr) thread_ = system_.spawn("cadre-progress", body_);
      }
      void join() {
        begin();
        thread_->join();
      }

     private:
      os::System& system_;
      const std::function<void()> body_;
      std::unique_ptr<os::Thread> thread_;
    };
    struct Handle final : os::Thread {
      explicit Handle(std::shared_ptr<Deferred> deferred) : deferred_(std::move(deferred)) {}
      void join() override { deferred_->join(); }
      std::shared_ptr<Deferred> deferred_;
    };
    std::vector<std::shared_ptr<Deferred>> deferred_;
    bool have_begun_ = false;
  };
  struct Lone {
    // The threads must run, because the destructor of the group waits for pending operations.
    ~Lone() { system.begin_threads(); }
    std::unique_ptr<os::System> native = os::make_native_system();
    CallersRunAll system{*native};
    std::unique_ptr<Communicator> group;
  };

  void install() {
    calls_->set_on_call([on_call = on_call_](FakeCall& call) {
      GroupCall seen(call);
      (*on_call)(seen);
      return seen.status();
    });
  }

  std::shared_ptr<FakeCalls> calls_ = std::make_shared<FakeCalls>();
  std::shared_ptr<Communicator> communicator_;
  Lone* lone_ = nullptr;  // owned by communicator_; null for a real group
};

}  // namespace cadre::testing
