// Compares the norm of gradients that are divided among ranks with a sum over all elements in
// float64.
#include "cadre/parallel/shard/sharded_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using torch::Tensor;
using Shards = std::vector<ParameterShard>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Returns the whole gradients, which are equal on all ranks. Some have odd sizes, some only a few
// elements or none.
std::vector<Tensor> whole_gradients(torch::ScalarType dtype) {
  std::vector<Tensor> gradients;
  double first = 0.3;
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{7, 5}, {3}, {}, {0, 2}, {4, 3, 6}}) {
    const Tensor values = torch::empty(sizes, dtype);
    const Tensor numbers = torch::arange(values.numel(), torch::kDouble) * 0.7 + first++;
    gradients.push_back(values.copy_(torch::sin(numbers).view(sizes)));
  }
  return gradients;
}

double norm_by_formula(const std::vector<Tensor>& gradients, double p) {
  double sum = 0;
  for (const Tensor& gradient : gradients) {
    const Tensor flat = gradient.to(torch::kDouble).flatten();
    for (int64_t i = 0; i < flat.numel(); ++i) {
      const double size = std::abs(flat[i].item<double>());
      sum = std::isinf(p) ? std::max(sum, size) : sum + std::pow(size, p);
    }
  }
  return std::isinf(p) ? sum : std::pow(sum, 1 / p);
}

struct Division {
  std::vector<MeshAxis> axes;
  // The placements of all parameters along `axes`. A parameter of 0 dims is replicated instead.
  std::vector<Placement> placements;
  std::optional<std::string> flat_axis;
};

ParameterShard divided(const Tensor& gradient, const DeviceMesh& mesh, const Division& division,
                       size_t index) {
  ParameterShard shard{.name = "p" + std::to_string(index),
                       .sizes = gradient.sizes().vec(),
                       .mesh = mesh,
                       .placements = division.placements,
                       .flat_axis = division.flat_axis};
  if (gradient.dim() == 0) shard.placements.assign(division.placements.size(), Replicate());
  const Box box = shard::local_box_of(shard);
  Tensor local = gradient;
  for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
    local = local.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
  }
  local = local.flatten();
  shard.range = {0, local.numel()};
  if (shard.flat_axis) {
    const shard::FlatLayout layout({local.numel()}, mesh.size(*shard.flat_axis), {.of_shards = 4});
    shard.range = layout.range(0, mesh.coordinate(*shard.flat_axis));
  }
  shard.values = torch::zeros({shard.range.size()}, gradient.dtype()).requires_grad_(true);
  shard.values.mutable_grad() = local.slice(0, shard.range.begin, shard.range.end).clone();
  return shard;
}

Shards divided(const std::vector<Tensor>& gradients, const DeviceMesh& mesh,
               const Division& division) {
  Shards shards;
  for (size_t i = 0; i < gradients.size(); ++i) {
    shards.push_back(divided(gradients[i], mesh, division, i));
  }
  return shards;
}

std::vector<Division> all_divisions() {
  const Placement whole = Replicate();
  const Placement rows = Shard(0);
  return {
      {{{"dp", 1}}, {whole}, "dp"},
      {{{"dp", 2}}, {whole}, "dp"},
      {{{"dp", 3}}, {whole}, "dp"},
      {{{"dp", 8}}, {whole}, "dp"},
      {{{"dp", 3}}, {whole}, std::nullopt},
      {{{"replicate", 2}, {"shard", 2}}, {whole, whole}, "shard"},
      {{{"dp", 2}, {"tp", 2}}, {whole, rows}, "dp"},
      {{{"dp", 2}, {"tp", 3}}, {whole, rows}, std::nullopt},
      {{{"pp", 2}, {"dp", 2}, {"tp", 2}}, {whole, whole, rows}, "dp"},
  };
}

int num_ranks(const Division& division) {
  int count = 1;
  for (const MeshAxis& axis : division.axes) count *= axis.size;
  return count;
}

void require_near(double value, double expected, const std::string& what) {
  require(std::abs(value - expected) <= 1e-12 * expected,
          what + ": " + std::to_string(value) + ", expected " + std::to_string(expected));
}

TEST(ShardedNorm, IsThatOfOneProcessAndTheSameOnAllRanks) {
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kBFloat16}) {
    const auto gradients = whole_gradients(dtype);
    for (const Division& division : all_divisions()) {
      const auto result = testing::run_groups(num_ranks(division), [&](const ProcessGroup& group,
                                                                       std::string& output) {
        const DeviceMesh mesh(group, division.axes);
        const Shards shards = divided(gradients, mesh, division);
        for (const double p : {1.0, 2.0, 3.5, kInfinity}) {
          const double norm = gradient_norm(shards, p);
          require_near(norm, norm_by_formula(gradients, p), "the " + std::to_string(p) + "-norm");
          output += std::string(reinterpret_cast<const char*>(&norm), sizeof norm);
        }
      });
      ASSERT_TRUE(result.ok()) << result.failures();
      for (const auto& rank : result.ranks) EXPECT_EQ(rank.output, result.ranks[0].output);
    }
  }
}

TEST(ShardedNorm, ScalesEveryShardOnce) {
  const auto gradients = whole_gradients(torch::kDouble);
  const double norm = norm_by_formula(gradients, 2);
  for (const Division& division : all_divisions()) {
    for (const double limit : {norm / 4, norm * 2, kInfinity}) {
      const auto result = testing::run_groups(num_ranks(division), [&](const ProcessGroup& group) {
        const DeviceMesh mesh(group, division.axes);
        const Shards shards = divided(gradients, mesh, division);
        const Shards before = divided(gradients, mesh, division);
        require_near(clip_grad_norm_(shards, limit), norm, "the norm before");
        const double factor = limit < norm ? limit / (norm + 1e-6) : 1;
        for (size_t i = 0; i < shards.size(); ++i) {
          require(
              torch::allclose(shards[i].values.grad(), before[i].values.grad() * factor, 1e-12, 0),
              shards[i].name);
        }
      });
      EXPECT_TRUE(result.ok()) << result.failures();
    }
  }
}

// Gradients are removed on all ranks, or on some of them. The norm must count only the elements
// that have a gradient.
TEST(ShardedNorm, AnUnusedParameterDoesNotCount) {
  const auto result = testing::run_groups(3, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"dp", 3}});
    Shards shards = divided(whole_gradients(torch::kFloat), mesh, {{}, {Replicate()}, "dp"});
    require(gradient_norm({}) == 0, "of nothing");
    for (ParameterShard& shard : shards) shard.values.mutable_grad().reset();
    require(clip_grad_norm_(shards, 1.0) == 0, "without gradients");
    if (group.rank() == 1) shards[0].values.mutable_grad() = torch::full_like(shards[0].values, 2);
    const double expected = 2 * std::sqrt(12.0);  // the 35 elements form shards of 12, 12 and 11
    require_near(gradient_norm(shards), expected, "of one rank's part");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardedNorm, WhatIsNotFiniteOnOneRankIsSoOnAll) {
  for (const double bad : {kInfinity, std::nan("")}) {
    for (const double p : {1.0, 2.0, kInfinity}) {
      const auto result =
          testing::run_groups(4, [&](const ProcessGroup& group, std::string& output) {
            const DeviceMesh mesh(group, {{"dp", 2}, {"tp", 2}});
            const Shards shards =
                divided(whole_gradients(torch::kFloat), mesh, {{}, {Replicate(), Shard(0)}, "dp"});
            const Tensor before = shards[0].values.grad().clone();
            if (group.rank() == 2) shards[4].values.mutable_grad()[1] = bad;
            output = failure_of([&] {
              clip_grad_norm_(shards, 1.0, {.norm_type = p, .error_if_nonfinite = true});
            });
            require(torch::equal(shards[0].values.grad(), before), "nothing was scaled");
            const double norm = clip_grad_norm_(shards, 1.0, {.norm_type = p});
            require(std::isnan(bad) ? std::isnan(norm) : std::isinf(norm), "the norm on all ranks");
          });
      ASSERT_TRUE(result.ok()) << result.failures();
      for (const auto& rank : result.ranks) {
        EXPECT_THAT(rank.output, HasSubstr("the first gradient with an element that is not finite "
                                           "is that of \"p4\", on rank 2. No gradient was scaled"));
        EXPECT_EQ(rank.output, result.ranks[0].output);
      }
    }
  }
}

TEST(ShardedNorm, OverflowIsNotTakenForABadElement) {
  const auto result = testing::run_groups(2, [](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"dp", 2}});
    const Shards shards =
        divided({torch::full({4}, 1e200, torch::kDouble)}, mesh, {{}, {Replicate()}, "dp"});
    require(failure_of([&] {
              clip_grad_norm_(shards, 1.0, {.error_if_nonfinite = true});
            }).find("every element is finite") != std::string::npos,
            "overflow");
    require(gradient_norm(shards, kInfinity) == 1e200, "the largest");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ShardedNorm, RefusesWhatItCannotSum) {
  const ProcessGroup alone = init_process_group();
  const DeviceMesh mesh(alone, {{"dp", 1}});
  Shards shards = divided({torch::ones({3, 2})}, mesh, {{}, {Replicate()}, "dp"});
  EXPECT_THAT(failure_of([&] { gradient_norm(shards, 0); }), HasSubstr("norm_type is 0"));
  EXPECT_THAT(failure_of([&] { clip_grad_norm_(shards, -1); }), HasSubstr("max_norm is -1"));
  shards[0].placements = {Partial()};
  EXPECT_THAT(failure_of([&] { gradient_norm(shards); }),
              HasSubstr("\"p0\" has the placements [Partial(sum)] on the mesh {dp: 1}"));
  shards[0].placements = {Replicate()};
  shards[0].values.mutable_grad() = torch::ones({6}).to_sparse();
  EXPECT_THAT(failure_of([&] { gradient_norm(shards); }),
              HasSubstr("\"p0\", of sizes (6), is not"));
}

struct ShardedModel {
  std::vector<ParameterShard> parameter_shards() { return shards; }
  Shards shards;
};
struct PlainModel {
  std::vector<Tensor> parameters() const { return tensors; }
  std::vector<Tensor> tensors;
};

TEST(ShardedNorm, TakesAnyWrapper) {
  const auto gradients = whole_gradients(torch::kDouble);
  const ProcessGroup alone = init_process_group();
  const DeviceMesh mesh(alone, {{"dp", 1}});
  ShardedModel sharded{divided(gradients, mesh, {{}, {Replicate()}, "dp"})};
  PlainModel plain;
  for (const ParameterShard& shard : sharded.shards) plain.tensors.push_back(shard.values);
  const double norm = norm_by_formula(gradients, 2);
  EXPECT_NEAR(clip_grad_norm_(sharded, kInfinity), norm, 1e-12 * norm);
  EXPECT_NEAR(clip_grad_norm_(plain, 0.5), norm, 1e-12 * norm);
  EXPECT_NEAR(clip_grad_norm_(sharded, kInfinity), 0.5, 1e-6);
}

}  // namespace
}  // namespace cadre
