// Tests a rank that kills or stops itself in each phase of a step of FullyShardedDataParallel with
// mapped shards (shards in shared memory that all ranks read). Every survivor must throw an error
// that names the rank in time; its code must be kCorruption if a shard may be half written. No
// process, thread or file may be leaked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/torch/disturbed_job.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/shard_training.h"

namespace cadre {
namespace {

using ::testing::AnyOf;
using testing::DisturbedRank;
using testing::GroupCall;
using ::testing::HasSubstr;
using testing::kVictim;
using testing::require;
using ::testing::StartsWith;
using torch::Tensor;

constexpr int64_t kSide = 64;  // so large that every rank owns whole pages of each unit

enum class StepPhase {
  kForward,   // the victim is in the forward, inside a unit
  kBackward,  // in the backward, between the gradients of two units
  // The victim's gradients are reduced; the others wait for it before they write their shards.
  kBeginUpdate,
  kWriting,      // the victim has written some of its elements
  kEndUpdate,    // the victim has written all of its elements, but has not signalled that yet
  kAfterUpdate,  // after the update, before the victim reads parameters again
};

struct StepFailureCase {
  int world_size;
  StepPhase phase;
  int signal;
};

std::string step_failure_name_of(const ::testing::TestParamInfo<StepFailureCase>& info) {
  const std::vector<std::string> phases = {"forward", "backward",   "begin_update",
                                           "writing", "end_update", "after_update"};
  return format("{}_in_{}_of_{}", info.param.signal == SIGKILL ? "kill" : "stop",
                phases[static_cast<size_t>(info.param.phase)], info.param.world_size);
}

using SideUnit = torch::nn::ModuleHolder<ShardUnit<torch::nn::LinearImpl>>;

struct SideNet : torch::nn::Module {
  SideNet() {
    first = register_module("first", SideUnit(kSide, kSide));
    second = register_module("second", SideUnit(kSide, kSide));
    head = register_module("head", torch::nn::Linear(kSide, 1));
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = torch::tanh(first->forward(x));
    if (in_forward) in_forward();
    if (h.requires_grad()) h.register_hook([this](const Tensor&) { in_backward(); });
    return head(torch::tanh(second->forward(h)));
  }
  SideUnit first{nullptr}, second{nullptr};
  torch::nn::Linear head{nullptr};
  std::function<void()> in_forward;
  std::function<void()> in_backward = [] {};
};

// An SGD that updates one parameter after the other, so that the test can interrupt it between two
// writes.
class InterruptedSgd : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  std::function<void()> halfway = [] {};
  std::function<void()> at_the_end = [] {};

  Tensor step(LossClosure closure = nullptr) override {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor>& parameters = param_groups()[0].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (i == parameters.size() / 2) halfway();
      parameters[i].add_(parameters[i].grad(), -0.1);
    }
    at_the_end();
    return closure ? closure() : Tensor();
  }
};

// One rank with its wrapper, and the hooks by which the test disturbs it.
struct MappedRank {
  explicit MappedRank(const ProcessGroup& world) : fake(world), group(fake.group()) {
    model = std::make_unique<FullyShardedDataParallel<SideNet>>(
        net, group,
        FullyShardedDataParallelOptions{.form = ShardForm::kMapped,
                                        .wrap_policy = wrap_shard_units()});
    require(model->form() == ShardForm::kMapped, "the shards are not mapped");
    optimizer = std::make_unique<ShardedOptimizer<InterruptedSgd>>(*model, 0.1);
  }

  void step() {
    optimizer->zero_grad();
    const Tensor x = torch::sin(torch::arange(4 * kSide) + group.rank()).view({4, kSide});
    (*model)(x).pow(2).mean().backward();
    optimizer->step();
  }

  void set_disturbance(StepPhase phase, const std::function<void()>& disturb) {
    if (phase == StepPhase::kForward) net->in_forward = disturb;
    if (phase == StepPhase::kBackward) net->in_backward = disturb;
    if (phase == StepPhase::kWriting) optimizer->halfway = disturb;
    if (phase == StepPhase::kEndUpdate) optimizer->at_the_end = disturb;
    if (phase != StepPhase::kBeginUpdate) return;
    fake.on_call = [disturb](GroupCall& call) {
      const bool is_fence = call.kind == OpKind::kAllReduce && call.op() == ReduceOp::kMax;
      if (is_fence && call.input.scalar_type() == torch::kLong) disturb();
      call.pass_on();
    };
  }

  testing::FakeGroup fake;
  ProcessGroup group;
  std::shared_ptr<SideNet> net = std::make_shared<SideNet>();
  std::unique_ptr<FullyShardedDataParallel<SideNet>> model;
  std::unique_ptr<ShardedOptimizer<InterruptedSgd>> optimizer;
};

// The victim is disturbed in its third step, when the wrapper has learned the order of units.
void take_steps(const DisturbedRank& self, MappedRank& rank, StepPhase phase) {
  const auto disturb = [&] { self.disturb_self(); };
  rank.step();
  rank.step();
  if (self.is_victim()) rank.set_disturbance(phase, disturb);
  rank.step();
  if (self.is_victim() && phase == StepPhase::kAfterUpdate) disturb();
  rank.step();
}

testing::FailureReport survive_step(DisturbedRank& self, const ProcessGroup& world,
                                    StepPhase phase) {
  MappedRank rank(world);
  return self.report_of(
      [&] { take_steps(self, rank, phase); },
      [&](const Error& error) {
        require(error.details().culprit == Rank(kVictim), error.message());
        // Every use of the parameters must throw after the failure.
        for (int times = 0; times < 2; ++times) {
          require(!testing::failure_of([&] { rank.step(); }).empty(),
                  "a step after the failure must throw");
          require(!testing::failure_of([&] { rank.optimizer->step(); }).empty(),
                  "an update after the failure must throw");
        }
        require(!testing::failure_of([&] { rank.net->first->weight.sum(); }).empty(),
                "a read after the failure must throw");
        const std::string touched =
            testing::failure_of([&] { rank.net->first->weight.const_data_ptr(); });
        require(touched.find("of unit \"first\"") != std::string::npos, "guarded: " + touched);
      });
}

class FsdpMappedFailure : public ::testing::TestWithParam<StepFailureCase> {};

TEST_P(FsdpMappedFailure, EverySurvivorNamesTheRankInTime) {
  const StepFailureCase& test = GetParam();
  const auto outcome =
      testing::run_disturbed({.world_size = test.world_size, .signal = test.signal},
                             testing::on_group([&](DisturbedRank& self, const ProcessGroup& world) {
                               return survive_step(self, world, test.phase);
                             }));
  for (const auto& [rank, message] : outcome.messages) {
    SCOPED_TRACE(rank);
    const bool is_writing =
        test.phase == StepPhase::kWriting || test.phase == StepPhase::kEndUpdate;
    if (test.signal == SIGSTOP) {
      EXPECT_THAT(message, AnyOf(HasSubstr("kTimeout: "), HasSubstr("kAborted: ")));
      EXPECT_THAT(message, HasSubstr("rank 1"));
    } else if (is_writing) {
      EXPECT_THAT(message, StartsWith("kCorruption: "));
      EXPECT_THAT(message, HasSubstr("rank 1 was lost while it wrote its shards"));
      EXPECT_THAT(message, HasSubstr("Resume from the last snapshot"));
    } else {
      EXPECT_THAT(message, StartsWith("kPeerLost: "));
    }
  }
}

std::vector<StepFailureCase> step_failure_cases() {
  std::vector<StepFailureCase> cases;
  for (const StepPhase phase :
       {StepPhase::kForward, StepPhase::kBackward, StepPhase::kBeginUpdate, StepPhase::kWriting,
        StepPhase::kEndUpdate, StepPhase::kAfterUpdate}) {
    cases.push_back({3, phase, SIGKILL});
  }
  // In each of these phases the survivors notice only at the deadline of the group that the victim
  // is stopped.
  for (const StepPhase phase : {StepPhase::kForward, StepPhase::kBackward, StepPhase::kBeginUpdate,
                                StepPhase::kWriting, StepPhase::kEndUpdate}) {
    cases.push_back({3, phase, SIGSTOP});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, FsdpMappedFailure,
                         ::testing::ValuesIn(testing::share_of(step_failure_cases())),
                         step_failure_name_of);

}  // namespace
}  // namespace cadre
