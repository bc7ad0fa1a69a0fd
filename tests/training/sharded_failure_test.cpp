// Tests a rank that kills or stops itself in each phase of a step under a sharded wrapper. Every
// survivor must throw an error that names the rank in time, and no process, thread or file may be
// leaked. A job that continues from the last snapshot must end with the same bits as an undisturbed
// job.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/seeds.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/disturbed_job.h"
#include "cadre/testing/torch/sharded_training.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using testing::DisturbedRank;
using testing::FakeGroup;
using testing::GroupCall;
using testing::RankContext;
using testing::require;
using testing::Strategy;
using torch::Tensor;

constexpr int kNumSteps = 6;
constexpr int kStepsPerSnapshot = 2;
constexpr int kDisturbedStep = 3;  // counted from 0, so this is the step after the first snapshot

enum class ShardedPhase { kForward, kGather, kBackward, kReduce, kClip, kStep, kSnapshot };

struct ShardedFailureCase {
  Strategy strategy;
  ShardedPhase phase;
  int signal;

  int world_size() const { return strategy.num_replicas > 1 ? 4 : 3; }
};

std::ostream& operator<<(std::ostream& out, const ShardedFailureCase& test) {
  return out << test.strategy.name << ", signal " << test.signal;
}

std::string name_of_sharded_failure(const ::testing::TestParamInfo<ShardedFailureCase>& info) {
  const std::vector<std::string> phases = {"forward", "gather", "backward", "reduce",
                                           "clip",    "step",   "snapshot"};
  return format("{}_{}_in_{}", info.param.strategy.name,
                info.param.signal == SIGKILL ? "kill" : "stop",
                phases[static_cast<size_t>(info.param.phase)]);
}

using WideUnit = torch::nn::ModuleHolder<ShardUnit<torch::nn::LinearImpl>>;

struct WideNet : torch::nn::Module {
  WideNet() {
    first = register_module("first", WideUnit(17, 31));
    second = register_module("second", WideUnit(31, 31));
    head = register_module("head", torch::nn::Linear(31, 3));
    testing::set_values(*this);
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = torch::tanh(first->forward(x));
    if (in_forward) in_forward();
    if (in_backward && h.requires_grad()) {
      h.register_hook([this](const Tensor&) { in_backward(); });
    }
    return head(torch::tanh(second->forward(h)));
  }
  WideUnit first{nullptr}, second{nullptr};
  torch::nn::Linear head{nullptr};
  std::function<void()> in_forward, in_backward;
};

class WatchedAdamW : public AdamW {
 public:
  using AdamW::AdamW;
  Tensor step(LossClosure closure = nullptr) override {
    if (in_step) in_step();
    return AdamW::step(std::move(closure));
  }
  std::function<void()> in_step;
};

// Hooks that disturb the victim. They are empty on the other ranks and in the other steps.
struct Watches {
  std::function<void()> at_gather, at_reduction, at_clip, at_snapshot;
};

ProcessGroup make_watched(const ProcessGroup& group, const Watches& watches) {
  const FakeGroup fake(group);
  fake.on_call = [&watches](GroupCall& call) {
    const bool is_gather = call.kind == OpKind::kAllGather && call.is_of_values();
    if (is_gather && watches.at_gather) watches.at_gather();
    if (call.is_reduction_of_values() && watches.at_reduction) watches.at_reduction();
    call.pass_on();
  };
  return fake.group();
}

// One rank of a job that trains under one of the wrappers.
class ShardedRank {
 public:
  ShardedRank(const Strategy& strategy, const ProcessGroup& group) : group_(group) {
    if (has_units(strategy.sharding)) {
      shard_fully(strategy);
    } else {
      replicate(strategy);
    }
  }
  // Closes the groups. Their destructors alone would abort operations that other ranks are still
  // running.
  ~ShardedRank() {
    for (const ProcessGroup& group : watched_) group.close();
    if (mesh_) mesh_->close();
  }
  ShardedRank(const ShardedRank&) = delete;
  ShardedRank& operator=(const ShardedRank&) = delete;

  void step(int number, const std::string& folder) {
    zero_grad_();
    const Tensor x =
        torch::sin(torch::arange(4 * 17) + 3 * number + 10 * group_.rank()).view({4, 17});
    forward_(x).pow(2).mean().backward();
    if (watches.at_clip) watches.at_clip();
    clip_();
    step_();
    if ((number + 1) % kStepsPerSnapshot != 0) return;
    if (watches.at_snapshot) watches.at_snapshot();
    SnapshotFolder snapshots(folder);
    save_sharded(snapshots, number + 1, parts(), group_, {.timeout = snapshot_timeout});
  }

  // Loads the latest snapshot and returns its step; 0 if there is no snapshot.
  int load(const std::string& folder) {
    const auto latest = SnapshotFolder(folder).latest();
    if (!latest) return 0;
    SnapshotParts loading = parts();
    const LoadedSnapshot loaded = load_sharded(*latest, loading, group_);
    load_state_dict(*local_, loading.parameters, loaded.optimizer);
    after_load_(*latest);
    return static_cast<int>(loaded.step);
  }

  std::string bits() {
    const torch::NoGradGuard no_grad;
    forward_(torch::zeros({1, 17}));  // waits until the parameters are gathered
    std::vector<Tensor> whole;
    if (shards_of_model_) {
      for (const ParameterShard& shard : shards_of_model_()) {
        whole.push_back(testing::assembled(
            shard, shard.values,
            shard.mesh.group(shard.flat_axis.value_or(shard.mesh.axes().back().name))));
      }
    } else {
      whole = testing::copies_of(net->parameters());
    }
    return testing::bits_of(whole);
  }

  void disturb_in(ShardedPhase phase, const std::function<void()>& disturb) {
    switch (phase) {
      case ShardedPhase::kForward:
        net->in_forward = disturb;
        return;
      case ShardedPhase::kGather:
        watches.at_gather = disturb;
        return;
      case ShardedPhase::kBackward:
        net->in_backward = disturb;
        return;
      case ShardedPhase::kReduce:
        watches.at_reduction = disturb;
        return;
      case ShardedPhase::kClip:
        watches.at_clip = disturb;
        return;
      case ShardedPhase::kStep:
        local_->in_step = disturb;
        return;
      case ShardedPhase::kSnapshot:
        watches.at_snapshot = disturb;
    }
  }

  std::shared_ptr<WideNet> net = std::make_shared<WideNet>();
  Watches watches;
  // The timeout of snapshots, which is independent of that of the group.
  Duration snapshot_timeout = kDefaultSnapshotTimeout;

 private:
  using Zero = ZeroRedundancyOptimizer<WatchedAdamW>;

  SnapshotParts parts() {
    SnapshotParts parts = parts_of(shards_(), *net);
    parts.optimizer = state_dict(*local_, parts.parameters);
    return parts;
  }

  ProcessGroup watched(const ProcessGroup& group) {
    return watched_.emplace_back(make_watched(group, watches));
  }

  void shard_fully(const Strategy& strategy) {
    parallel::ShardGroups groups = parallel::ShardGroups::of(group_);
    if (strategy.num_replicas > 1) {
      mesh_.emplace(group_,
                    std::vector<MeshAxis>{{"replicate", strategy.num_replicas},
                                          {"shard", group_.world_size() / strategy.num_replicas}});
      groups = parallel::ShardGroups::of(*mesh_);
      groups.shard = watched(mesh_->group("shard"));
      groups.replicate = watched(mesh_->group("replicate"));
    }
    groups.all = watched(group_);
    FullyShardedDataParallelOptions options = strategy.fsdp;
    options.wrap_policy = wrap_shard_units();
    const auto model = std::make_shared<FullyShardedDataParallel<WideNet>>(net, groups, options);
    const auto optimizer =
        std::make_shared<ShardedOptimizer<WatchedAdamW>>(*model, torch::optim::AdamWOptions(0.01));
    local_ = optimizer.get();
    shards_ = [model] { return model->parameter_shards(); };
    shards_of_model_ = shards_;
    zero_grad_ = [optimizer] { optimizer->zero_grad(); };
    forward_ = [model](const Tensor& x) { return (*model)(x); };
    clip_ = [model] { clip_grad_norm_(*model, 0.5); };
    step_ = [optimizer] { optimizer->step(); };
    after_load_ = [](const std::string&) {};
  }

  void replicate(const Strategy& strategy) {
    const bool has_shards = strategy.sharding == DataStrategy::kZero2;
    DistributedDataParallelOptions options{.bucket_caps = {.first_bytes = 1000, .bytes = 3000}};
    if (has_shards) options.gradients = GradientPlacement::kSharded;
    const auto model =
        std::make_shared<DistributedDataParallel<WideNet>>(net, watched(group_), options);
    const ZeroOptions zero{.bucket_cap_bytes = 3000, .wait_in_step = !has_shards};
    const auto optimizer = std::make_shared<Zero>(*model, torch::optim::AdamWOptions(0.01), zero);
    local_ = &optimizer->local_optimizer();
    shards_ = [optimizer] { return optimizer->parameter_shards(); };
    zero_grad_ = [optimizer] { optimizer->zero_grad(); };
    forward_ = [model](const Tensor& x) { return (*model)(x); };
    clip_ = [model, has_shards] {
      if (has_shards) {
        clip_grad_norm_(*model, 0.5);
      } else {
        clip_grad_norm_(model->parameters(), 0.5);
      }
    };
    step_ = [optimizer] { optimizer->step(); };
    after_load_ = [this, model](const std::string& path) {
      for (const auto& flat : shard::WrapperAccess::flat_parameters(*model)) {
        flat->mark_stale();
        flat->unshard_async();
        flat->wait_unsharded();
      }
      if (!shard::WrapperAccess::flat_parameters(*model).empty()) return;
      load_sharded(path, parts_of(*net), group_, {.with_optimizer = false});
    };
  }

  ProcessGroup group_;
  std::optional<DeviceMesh> mesh_;
  std::vector<ProcessGroup> watched_;
  WatchedAdamW* local_ = nullptr;  // owned by step_
  std::function<std::vector<ParameterShard>()> shards_, shards_of_model_;
  std::function<void()> zero_grad_, clip_, step_;
  std::function<Tensor(const Tensor&)> forward_;
  std::function<void(const std::string&)> after_load_;
};

// Trains until the victim is disturbed. On the survivors this function throws.
void train_until_disturbed(const DisturbedRank& self, ShardedRank& rank, ShardedPhase phase,
                           const std::string& folder) {
  for (int number = 0; number < kNumSteps; ++number) {
    if (number == kDisturbedStep && self.is_victim()) {
      rank.disturb_in(phase, [&] { self.disturb_self(); });
    }
    rank.step(number, folder);
  }
}

// Runs an undisturbed job, which starts from the last snapshot in the folder if there is one, and
// returns its final bits, which must be equal on all ranks.
std::string bits_of_whole_run(const ShardedFailureCase& test, const std::string& folder,
                              int expected_start) {
  testing::JobOptions options{.world_size = test.world_size()};
  options.processes.time_limit = seconds(60);
  const auto result =
      testing::run_job(options, [&](RankContext& context, const Membership& membership) {
        at::set_num_threads(1);
        const ProcessGroup group(testing::connect(context, membership, {}));
        {
          ShardedRank rank(test.strategy, group);
          const int start = rank.load(folder);
          require(start == expected_start, format("the job starts at step {}", start));
          for (int number = start; number < kNumSteps; ++number) rank.step(number, folder);
          context.output = format("{}", std::hash<std::string>()(rank.bits()));
        }
        group.close();
      });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, result.ranks[0].output);
  return result.ranks[0].output;
}

class ShardedFailure : public ::testing::TestWithParam<ShardedFailureCase> {};

TEST_P(ShardedFailure, IsNamedInTimeAndTheRunGoesOnFromTheLastSnapshot) {
  const ShardedFailureCase& test = GetParam();
  const testing::TemporaryFolder folder;
  const testing::TemporaryFolder undisturbed;
  const testing::DisturbedJob job{.world_size = test.world_size(), .signal = test.signal};
  const auto train = [&](DisturbedRank& self, const ProcessGroup& group) {
    ShardedRank rank(test.strategy, group);
    rank.snapshot_timeout = job.timeout();
    return self.report_of([&] { train_until_disturbed(self, rank, test.phase, folder.path()); });
  };
  const auto outcome = testing::run_disturbed(job, testing::on_group(train));
  testing::expect_victim_named(job, outcome,
                               test.strategy.num_replicas > 1 ? testing::WaitsIn::kGroupsOfAxes
                                                              : testing::WaitsIn::kOneGroup);
  EXPECT_EQ(bits_of_whole_run(test, folder.path(), kStepsPerSnapshot),
            bits_of_whole_run(test, undisturbed.file("run"), 0));
}

std::vector<ShardedFailureCase> sharded_failure_cases() {
  std::vector<ShardedFailureCase> cases;
  const std::vector<Strategy> strategies = {
      {"zero1", DataStrategy::kZero1},
      {"zero2", DataStrategy::kZero2},
      {"fsdp", DataStrategy::kFsdp},
      {"fsdp_mapped", DataStrategy::kFsdp, {.form = ShardForm::kMapped}},
      {"hsdp", DataStrategy::kHsdp, {}, 2},
  };
  for (const ShardedPhase phase :
       {ShardedPhase::kForward, ShardedPhase::kGather, ShardedPhase::kBackward,
        ShardedPhase::kReduce, ShardedPhase::kClip, ShardedPhase::kStep, ShardedPhase::kSnapshot}) {
    for (const int signal : {SIGKILL, SIGSTOP}) {
      for (const Strategy& strategy : strategies) {
        // Mapped shards have no gather in which the victim could be disturbed, and
        // fsdp_mapped_failure_test.cpp tests failures in their update.
        const bool is_mapped = strategy.fsdp.form == ShardForm::kMapped;
        if (is_mapped && (phase == ShardedPhase::kGather || phase == ShardedPhase::kStep)) continue;
        cases.push_back({strategy, phase, signal});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(
    Cases, ShardedFailure,
    ::testing::ValuesIn(testing::share_of(testing::share_of(sharded_failure_cases()))),
    name_of_sharded_failure);

}  // namespace
}  // namespace cadre
