// Tests divided experts under DistributedDataParallel along another axis of the mesh, and in
// snapshots that are loaded by other numbers of ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/ep/expert_parallel.h"
#include "cadre/parallel/ep/mixture_of_experts.h"
#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

using torch::Tensor;

constexpr int kTrainedSteps = 20;
constexpr RouterLossWeights kLossWeights{.load_balance = 0.1, .z = 0.02};

struct ExpertNet : torch::nn::Module {
  ExpertNet() {
    first = register_module("first", torch::nn::Linear(3, 6));
    experts =
        register_module("experts", MixtureOfExperts(MixtureOfExpertsOptions{
                                       .features = 6, .hidden_features = 5, .num_experts = 4}));
    to(torch::kDouble);
  }
  MixtureOfExpertsOutput forward(const Tensor& x) { return experts(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr};
  MixtureOfExperts experts{nullptr};
};

std::shared_ptr<ExpertNet> make_expert_net(uint64_t seed) {
  torch::manual_seed(seed);
  return std::make_shared<ExpertNet>();
}

// Returns a batch of 11 rows.
Tensor batch_of(int step) {
  return torch::sin(torch::arange(33, torch::kDouble).square() * 0.3 + step).view({11, 3});
}

void train_alone(ExpertNet& net) {
  torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kTrainedSteps; ++step) {
    optimizer.zero_grad();
    const Tensor x = batch_of(step);
    const auto output = net.forward(x);
    (output.values.square().sum() / x.size(0) + output.losses.weighted(kLossWeights)).backward();
    optimizer.step();
  }
}

void train_under_ddp(const std::shared_ptr<ExpertNet>& net, const ExpertParallel& experts,
                     const DeviceMesh& mesh) {
  DistributedDataParallel ddp{net, mesh.group("dp"), {.weighting = GradientWeighting::kSum}};
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const int64_t rank = mesh.coordinate("dp") * 2 + mesh.coordinate("ep");
  for (int step = 0; step < kTrainedSteps; ++step) {
    optimizer.zero_grad();
    const Tensor x = batch_of(step).narrow(0, rank * 3, rank == 3 ? 2 : 3);
    const auto output = ddp(x);
    const Tensor loss = experts.mean_over_tokens(output.values.square().sum(), x.size(0)) +
                        output.losses.weighted(kLossWeights);
    loss.backward();
    experts.sum_gradients({.reduced_axes = {"dp"}});
    optimizer.step();
  }
}

void require_parts_of(const ExpertNet& whole, const ExpertParallel& experts, double tolerance,
                      const std::string& what) {
  const auto expected = whole.named_parameters();
  for (const ParameterShard& record : experts.parameter_shards()) {
    const Box box = shard::local_box_of(record);
    Tensor part = expected[record.name].detach();
    for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
      part = part.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
    }
    const double difference = (record.values.detach() - part).abs().max().item<double>();
    testing::require(difference <= tolerance * part.abs().max().item<double>(),
                     what + ": " + record.name + " differs by " + std::to_string(difference));
  }
}

TEST(ExpertParallelTraining, EqualsOneProcessUnderDistributedDataParallel) {
  const auto alone = make_expert_net(1);
  train_alone(*alone);
  std::vector<std::shared_ptr<ExpertNet>> nets;
  for (uint64_t rank = 0; rank < 4; ++rank) nets.push_back(make_expert_net(1 + rank));
  const auto result = testing::run_groups(4, [&](const ProcessGroup& group) {
    const auto net = std::move(nets[static_cast<size_t>(group.rank())]);
    const DeviceMesh mesh(group, {{"dp", 2}, {"ep", 2}});
    const ExpertParallel experts(*net, mesh);
    train_under_ddp(net, experts, mesh);
    require_parts_of(*alone, experts, 1e-10, "trained");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The ranks along "ep" have different experts. A DistributedDataParallel over these ranks would
// broadcast the experts of rank 0 to all of them.
TEST(ExpertParallelTraining, DistributedDataParallelRefusesRanksWithOtherExperts) {
  std::vector<std::shared_ptr<ExpertNet>> nets;
  for (uint64_t rank = 0; rank < 2; ++rank) nets.push_back(make_expert_net(1));
  const auto result = testing::run_groups(2, [&](const ProcessGroup& group) {
    const auto net = std::move(nets[static_cast<size_t>(group.rank())]);
    const ExpertParallel experts(*net, DeviceMesh(group, {{"ep", 2}}));
    std::string message = "no error";
    try {
      const DistributedDataParallel ddp{net, group, {.weighting = GradientWeighting::kEqual}};
    } catch (const Error& error) {
      message = error.what();
    }
    testing::require(
        message.find(
            "\"experts.up_weight\" is Double (2, 5, 6) that requires grad, shard 0 (divided by "
            "ExpertParallel) on rank 0 and Double (2, 5, 6) that requires grad, shard 1 (divided "
            "by ExpertParallel) on rank 1; build the same model on all ranks, in a group of ranks "
            "that hold the same shards of its parameters") != std::string::npos,
        message);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ExpertParallelTraining, ASnapshotLoadsOnOtherNumbersOfRanks) {
  const auto saved = make_expert_net(1);
  const testing::TemporaryFolder folder;
  std::vector<std::shared_ptr<ExpertNet>> nets;
  for (uint64_t rank = 0; rank < 4; ++rank) nets.push_back(make_expert_net(1 + rank));
  auto result = testing::run_groups(4, [&](const ProcessGroup& group) {
    const auto net = std::move(nets[static_cast<size_t>(group.rank())]);
    const ExpertParallel experts(*net, DeviceMesh(group, {{"dp", 2}, {"ep", 2}}));
    SnapshotFolder snapshots(folder.path());
    save_sharded(snapshots, 7, parts_of(experts.parameter_shards(), *net), group);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  const SnapshotFolder snapshots(folder.path());
  const auto whole = make_expert_net(8);
  load_sharded(snapshots.latest().value(), parts_of(*whole));
  for (const auto& parameter : saved->named_parameters()) {
    EXPECT_TRUE(torch::equal(whole->named_parameters()[parameter.key()], parameter.value()))
        << parameter.key();
  }
  for (uint64_t rank = 0; rank < 4; ++rank) nets[rank] = make_expert_net(20 + rank);
  result = testing::run_groups(4, [&](const ProcessGroup& group) {
    const auto net = std::move(nets[static_cast<size_t>(group.rank())]);
    const ExpertParallel experts(*net, DeviceMesh(group, {{"ep", 4}}));
    load_sharded(snapshots.latest().value(), parts_of(experts.parameter_shards(), *net), group);
    require_parts_of(*saved, experts, 0, "loaded");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// An expert computes tokens of several ranks, so it would be wrong to weight its gradients by the
// samples of one rank.
TEST(ExpertParallelUnderDdp, WeightingBySamplesIsRefusedOnAllRanks) {
  const auto net = [] { return make_expert_net(3); };
  const auto result = testing::run_groups(4, [&](const ProcessGroup& world, std::string& output) {
    const DeviceMesh mesh(world, {{"dp", 2}, {"ep", 2}});
    const auto module = net();
    const ExpertParallel experts(*module, mesh);
    output = testing::failure_of([&] { DistributedDataParallel(module, mesh.group("dp")); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_NE(rank.output.find("Set weighting = GradientWeighting::kSum on all ranks"),
              std::string::npos)
        << rank.output;
  }
}

}  // namespace
}  // namespace cadre
