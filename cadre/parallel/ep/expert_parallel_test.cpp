// Tests the values, ParameterShards and gradient norms of a module that ExpertParallel has divided,
// and the errors for modules that it cannot divide.
#include "cadre/parallel/ep/expert_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/ep/mixture_of_experts.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/testing/torch/ep_models.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/rank_expectations.h"
#include "cadre/testing/torch/shard_records.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using testing::make_expert_model;
using testing::require;
using testing::require_refused;
using testing::run_groups;
using torch::Tensor;

// Runs `body` on dp * ep ranks, as threads. The ranks' models have different initial weights, of
// which only rank 0's are used.
void run_with_models(const testing::Degrees& degrees,
                     const std::function<void(const DeviceMesh&, testing::ExpertModel&)>& body) {
  std::vector<std::shared_ptr<testing::ExpertModel>> models;
  for (int rank = 0; rank < degrees.dp * degrees.ep; ++rank) {
    models.push_back(make_expert_model({"gpt", "sgd", 4}, 1 + static_cast<uint64_t>(rank)));
  }
  const auto result =
      run_groups(degrees.dp * degrees.ep, [&](const ProcessGroup& group, std::string&) {
        // The rank's model must be destroyed before the os::System of its group.
        const auto model = std::move(models[static_cast<size_t>(group.rank())]);
        body(DeviceMesh(group, {{"dp", degrees.dp}, {"ep", degrees.ep}}), *model);
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ExpertParallel, KeepsThisRanksExpertsOfRankZerosWeights) {
  const auto plain = make_expert_model({"gpt", "sgd", 4}, 1);
  run_with_models({.dp = 2, .ep = 2}, [&](const DeviceMesh& mesh, testing::ExpertModel& model) {
    const ExpertParallel experts(model, mesh);
    const std::vector<ParameterShard> records = experts.parameter_shards();
    const int num_divided = testing::num_divided(records, model, *plain, 1);
    // 8 divided parameters: 4 parameters of experts in each of 2 layers.
    require(num_divided == 8, "divided: " + std::to_string(num_divided));
    for (const ParameterShard& record : records) {
      require(record.placements[0].is_replicate(), "dp of " + record.name);
    }
  });
}

TEST(ExpertParallel, TheNormIsThatOfOneProcess) {
  const auto plain = make_expert_model({"gpt", "sgd", 4}, 1);
  torch::manual_seed(9);
  const Tensor batch = plain->make_batch(4);
  plain->loss(plain->forward(batch), batch).backward();
  const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.05);
  run_with_models({.dp = 2, .ep = 2}, [&](const DeviceMesh& mesh, testing::ExpertModel& model) {
    const ExpertParallel experts(model, mesh);
    model.experts = &experts;
    const int64_t row = mesh.coordinate("dp") * 2 + mesh.coordinate("ep");
    const Tensor own = batch.narrow(0, row, 1);
    model.loss(model.forward(own), own).backward();
    experts.sum_gradients();
    const double norm = clip_grad_norm_(experts, 0.05);
    require(std::abs(norm - expected) < 1e-10 * expected,
            std::to_string(norm) + " is not " + std::to_string(expected));
    require(torch::allclose(model.named_parameters()["head.weight"].grad(),
                            plain->named_parameters()["head.weight"].grad(), 1e-9, 1e-12),
            "clipped gradients");
    // A norm over this rank's experts only would differ between ranks, so clip_grad_norm_() of
    // plain tensors throws.
    require_refused(
        [&] {
          const std::vector<Tensor> parameters = model.parameters();
          clip_grad_norm_(std::span<const Tensor>(parameters), 1.0);
        },
        "shard of \"first.experts.up_weight\"");
  });
}

// If one rank has a gradient of a parameter, all ranks have one after sum_gradients(). If no rank
// ran a backward, no rank has a gradient.
TEST(ExpertParallel, ParametersWithoutAGradientCountAsZeros) {
  run_with_models({.dp = 2, .ep = 2}, [&](const DeviceMesh& mesh, testing::ExpertModel& model) {
    const ExpertParallel experts(model, mesh);
    auto parameters = model.named_parameters();
    const Tensor positions = parameters["positions.weight"];
    const Tensor expert = parameters["first.experts.up_bias"];
    if (mesh.coordinate("ep") == 1) positions.mutable_grad() = torch::ones_like(positions);
    if (mesh.coordinates() == std::vector<int>{1, 0}) {
      expert.mutable_grad() = torch::ones_like(expert);
    }
    experts.sum_gradients();
    require(torch::equal(positions.grad(), torch::full_like(positions, 2)), "positions");
    require(mesh.coordinate("ep") == 1 ? !expert.grad().defined()
                                       : torch::equal(expert.grad(), torch::ones_like(expert)),
            "experts");
    require(!parameters["head.weight"].grad().defined(), "no gradient");
    require_refused([&] { experts.sum_gradients({.reduced_axes = {"tp"}}); }, "\"tp\"");
  });
}

TEST(ExpertParallel, OneRankLeavesThePlainLayer) {
  run_with_models({.dp = 1, .ep = 1}, [&](const DeviceMesh& mesh, testing::ExpertModel& model) {
    const Tensor batch = model.make_batch(2);
    const Tensor expected = model.forward(batch);
    const ExpertParallel experts(model, mesh);
    require(torch::equal(model.forward(batch), expected), "values");
    require_refused([&] { const ExpertParallel again(model, mesh); },
                    "\"first.experts\" cannot be divided along \"ep\" of {dp: 1, ep: 1}: its "
                    "experts are divided already; divide a module once");
  });
}

// A layer that is registered under two names is divided once.
TEST(ExpertParallel, DividesASharedLayerOnce) {
  run_with_models({.dp = 1, .ep = 2}, [&](const DeviceMesh& mesh, testing::ExpertModel&) {
    MixtureOfExperts layer(
        MixtureOfExpertsOptions{.features = 2, .hidden_features = 2, .num_experts = 6});
    torch::nn::Sequential pair(layer, layer);
    const ExpertParallel experts(*pair, mesh);
    require(layer->up_weight.size(0) == 3, "half of the experts");
    require(experts.parameter_shards().size() == 5, "one record for each parameter");
    require(experts.parameter_shards()[1].sizes[0] == 6, "whole sizes");
  });
}

TEST(ExpertParallel, RefusesWhatCannotBeDivided) {
  run_with_models({.dp = 1, .ep = 3}, [&](const DeviceMesh& mesh, testing::ExpertModel& model) {
    const MixtureOfExpertsOptions four{.features = 2, .hidden_features = 2, .num_experts = 4};
    MixtureOfExperts layer(four);
    require_refused([&] { const ExpertParallel experts(*layer, mesh); },
                    "cannot be divided along \"ep\" of {dp: 1, ep: 3}: 3 ranks do not divide its 4 "
                    "experts; take a number of experts that is a multiple of 3");
    require_refused([&] { const ExpertParallel experts(model, mesh, {.expert_axis = "tp"}); },
                    "\"tp\"");
    torch::nn::Linear linear(2, 2);
    require_refused([&] { const ExpertParallel experts(*linear, mesh); },
                    "has no MixtureOfExperts, so there is nothing to divide along \"ep\"");
    const Tensor weight = model.named_parameters()["second.experts.router.weight"];
    weight.mutable_grad() = torch::zeros_like(weight);
    require_refused([&] { const ExpertParallel experts(model, mesh); },
                    "its router.weight has a gradient; divide a module before its first backward");
    MixtureOfExpertsOptions six{.features = 2, .hidden_features = 2, .num_experts = 6};
    if (mesh.coordinate("ep") == 2) six.capacity_factor = 1.5;
    MixtureOfExperts other(six);
    require_refused([&] { const ExpertParallel experts(*other, mesh); },
                    "capacity_factor not given, activation 0 on rank 0 and 2 of 6 experts, "
                    "normalize_weights on, capacity_factor 1.5, activation 0 on rank 2; pass the "
                    "same module with the same options on all ranks");
    require(other->up_weight.size(0) == 6, "a refused module is unchanged");
  });
}

// ExpertParallel must throw if another module also has these experts, or shares their memory. The
// experts would be divided twice, or the two modules would no longer have equal weights.
TEST(ExpertParallel, RefusesExpertsThatAnotherModuleHas) {
  struct Twins : torch::nn::Module {
    Twins() {
      const MixtureOfExpertsOptions options{.features = 2, .hidden_features = 2, .num_experts = 4};
      first = register_module("first", MixtureOfExperts(options));
      second = register_module("second", MixtureOfExperts(options));
      second->up_weight.set_data(first->up_weight.detach());
    }
    MixtureOfExperts first{nullptr}, second{nullptr};
  };
  run_with_models({.dp = 1, .ep = 2}, [&](const DeviceMesh& mesh, testing::ExpertModel&) {
    Twins memory;
    require_refused([&] { const ExpertParallel experts(memory, mesh); },
                    "\"first.up_weight\" and \"second.up_weight\" share memory");
    require(memory.first->up_weight.size(0) == 4, "a refused module is unchanged");
    struct Probe : torch::nn::Module {
      explicit Probe(const Tensor& weight) { register_parameter("weight", weight); }
      Tensor forward(const Tensor& x) { return x; }
    };
    MixtureOfExperts layer(
        MixtureOfExpertsOptions{.features = 2, .hidden_features = 2, .num_experts = 4});
    torch::nn::Sequential pair(layer, Probe(layer->up_weight));
    require_refused([&] { const ExpertParallel experts(*pair, mesh); },
                    "the parameter \"weight\" of \"1\" is also a parameter of experts");
    require(layer->up_weight.size(0) == 4, "a refused module is unchanged");
  });
}

// If ExpertParallel fails on one rank only, all ranks throw that rank's error, and the groups stay
// usable.
TEST(ExpertParallel, AllRanksRefuseWhatOneRefuses) {
  run_with_models({.dp = 2, .ep = 2}, [&](const DeviceMesh& mesh, testing::ExpertModel& model) {
    const bool is_last = mesh.coordinates() == std::vector<int>{1, 1};
    MixtureOfExperts layer(MixtureOfExpertsOptions{
        .features = 2, .hidden_features = 2, .num_experts = is_last ? 3 : 4});
    require_refused([&] { const ExpertParallel experts(*layer, mesh); },
                    "2 ranks do not divide its 3 experts; take a number of experts that is a "
                    "multiple of 2 (on rank 3 of 4 of group ");
    require_refused(
        [&] { const ExpertParallel experts(model, mesh, {.expert_axis = is_last ? "tp" : "ep"}); },
        "\"tp\"");
    const ExpertParallel experts(model, mesh);
  });
}

}  // namespace
}  // namespace cadre
