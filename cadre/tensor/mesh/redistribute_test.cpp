// Tests redistribution between all pairs of lists of placements, forward and backward, against
// plain tensors of one process, and local_box() against torch::chunk. The ranks are threads.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/dtensor.h"
#include "cadre/testing/torch/placement_reference.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::coordinates_in;
using testing::num_ranks_of;
using testing::operand_gradients;
using testing::operand_of;
using testing::operand_sizes;
using testing::reference_part;
using testing::run_groups;
using testing::value_of;
using torch::Tensor;
using Placements = std::vector<Placement>;

const std::vector<std::vector<int64_t>> kSizes = {{4, 6}, {5, 3}, {1, 7}, {0, 3}};

// Returns all lists that have num_axes placements out of `choices`.
std::vector<Placements> lists_of(const Placements& choices, size_t num_axes) {
  std::vector<Placements> lists = {{}};
  for (size_t axis = 0; axis < num_axes; ++axis) {
    std::vector<Placements> longer;
    for (const Placements& list : lists) {
      for (const Placement& choice : choices) {
        longer.push_back(list);
        longer.back().push_back(choice);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

std::vector<MeshAxis> axes_of(const std::vector<int>& shape) {
  std::vector<MeshAxis> axes;
  for (const int size : shape) axes.push_back({format("axis{}", axes.size()), size});
  return axes;
}

// One redistribution to test, with the results and gradients that the ranks have computed.
struct Trial {
  std::vector<int64_t> sizes;
  Placements from;
  Placements to;
  // The operands of all ranks in the placements `from`.
  Tensor operands;
  // The coefficients of the linear loss. If undefined, only the forward is tested.
  Tensor weights = {};
  std::vector<Tensor> results = {};
  std::vector<Tensor> gradients = {};

  std::string name() const {
    return format("({}, {}) {} -> {}", sizes[0], sizes[1], to_string(std::span(from)),
                  to_string(std::span(to)));
  }
};

// Returns integers from -4 to 4, so that sums and products are exact in every order.
Tensor small_numbers(const std::vector<int64_t>& sizes, torch::Dtype dtype) {
  return torch::randint(-4, 5, sizes, torch::kLong).to(dtype);
}

Trial trial_of(const std::vector<int>& shape, const std::vector<int64_t>& sizes,
               const Placements& from, const Placements& to) {
  return {.sizes = sizes,
          .from = from,
          .to = to,
          .operands = small_numbers(operand_sizes(sizes, shape, from), torch::kDouble),
          .weights = small_numbers(sizes, torch::kDouble)};
}

void run_trial(const DeviceMesh& mesh, int rank, Trial& trial) {
  const std::vector<int>& coordinates = mesh.coordinates();
  const Tensor part = reference_part(operand_of(trial.operands, coordinates, trial.from),
                                     mesh.shape(), coordinates, trial.from);
  // The local tensor is column-major, so that non-contiguous input is tested, too.
  const Tensor local = part.t().clone(torch::MemoryFormat::Contiguous).t();
  if (trial.weights.defined()) local.requires_grad_(true);
  const DTensor tensor = DTensor::from_local(local, mesh, trial.from, trial.sizes);
  const DTensor result = tensor.redistribute(trial.to);
  const auto place = static_cast<size_t>(rank);
  trial.results[place] = result.local().detach();
  testing::require(result.local().storage().nbytes() == result.local().nbytes(),
                   trial.name() + ": it keeps more than its part");
  if (!trial.weights.defined()) return;
  const Tensor gradient = reference_part(
      operand_of(operand_gradients(trial.weights, mesh.shape(), trial.to), coordinates, trial.to),
      mesh.shape(), coordinates, trial.to);
  result.local().backward(gradient.clone());
  trial.gradients[place] = local.grad();
}

bool are_close(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  return a.is_floating_point() ? torch::allclose(a, b, 1e-12, 1e-12) : torch::equal(a, b);
}

// Returns the results of all ranks that differ from rank `self` only along Partial axes. Together
// they are the operands of one reduction.
Tensor operands_held(const std::vector<int>& shape, const Trial& trial, int self) {
  const std::vector<int> own = coordinates_in(shape, self);
  std::vector<Tensor> held;
  for (int rank = 0; rank < num_ranks_of(shape); ++rank) {
    const std::vector<int> coordinates = coordinates_in(shape, rank);
    bool is_peer = true;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      is_peer &= trial.to[axis].partial() != nullptr || coordinates[axis] == own[axis];
    }
    if (is_peer) held.push_back(trial.results[static_cast<size_t>(rank)]);
  }
  return torch::stack(held).view(operand_sizes(held.front().sizes().vec(), shape, trial.to));
}

void verify_trial(const std::vector<int>& shape, const Trial& trial) {
  const Tensor value = value_of(trial.operands, trial.from);
  for (int rank = 0; rank < num_ranks_of(shape); ++rank) {
    const std::string where = format("{}, rank {}", trial.name(), rank);
    const std::vector<int> coordinates = coordinates_in(shape, rank);
    const Tensor expected = reference_part(value, shape, coordinates, trial.to);
    ASSERT_TRUE(trial.results[static_cast<size_t>(rank)].sizes() == expected.sizes()) << where;
    const Tensor actual = value_of(operands_held(shape, trial, rank), trial.to);
    ASSERT_TRUE(are_close(actual, expected)) << where << "\n" << actual << "\n" << expected;
    if (!trial.weights.defined()) continue;
    const Tensor expected_gradient = reference_part(
        operand_of(operand_gradients(trial.weights, shape, trial.from), coordinates, trial.from),
        shape, coordinates, trial.from);
    const Tensor gradient = trial.gradients[static_cast<size_t>(rank)];
    ASSERT_TRUE(gradient.defined()) << where;
    ASSERT_TRUE(are_close(gradient, expected_gradient)) << where << ", gradient\n"
                                                        << gradient << "\n"
                                                        << expected_gradient;
  }
}

void check_trials(const std::vector<int>& shape, std::vector<Trial> trials,
                  TransportChoice transport = TransportChoice::kAuto) {
  const int num_ranks = num_ranks_of(shape);
  for (Trial& trial : trials) {
    trial.results.resize(static_cast<size_t>(num_ranks));
    trial.gradients.resize(static_cast<size_t>(num_ranks));
  }
  const auto body = [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, axes_of(shape));
    for (Trial& trial : trials) run_trial(mesh, world.rank(), trial);
    mesh.close();
  };
  const auto result = run_groups(num_ranks, body, {.transport = transport});
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const Trial& trial : trials) {
    verify_trial(shape, trial);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// Checks the redistribution between each pair of lists of placements from `choices`.
void check_all_pairs(const std::vector<int>& shape, const Placements& choices,
                     TransportChoice transport = TransportChoice::kAuto) {
  torch::manual_seed(1);
  const std::vector<Placements> lists = lists_of(choices, shape.size());
  std::vector<Trial> trials;
  for (const std::vector<int64_t>& sizes : kSizes) {
    for (const Placements& from : lists) {
      for (const Placements& to : lists) trials.push_back(trial_of(shape, sizes, from, to));
    }
  }
  check_trials(shape, std::move(trials), transport);
}

TEST(Redistribute, AllPairsOnOneAxis) {
  for (const int size : {1, 2, 3, 4}) {
    check_all_pairs({size}, {Shard(0), Shard(1), Replicate(), Partial(), Partial(ReduceOp::kAvg)});
    if (HasFatalFailure()) return;
  }
}

TEST(Redistribute, AllPairsOverTcp) {
  check_all_pairs({3}, {Shard(0), Shard(1), Replicate(), Partial()}, TransportChoice::kTcp);
}

TEST(Redistribute, AllPairsOnTwoByTwo) {
  check_all_pairs({2, 2}, {Shard(0), Shard(1), Replicate(), Partial()});
}

TEST(Redistribute, AllPairsOnTwoByThree) {
  check_all_pairs({2, 3}, {Shard(0), Shard(1), Replicate(), Partial()});
}

// The meshes have three axes; in the second mesh one of them has size 1. The placements include
// means and sums.
TEST(Redistribute, PairsOnThreeAxes) {
  for (const std::vector<int>& shape : {std::vector<int>{2, 2, 2}, {2, 1, 3}}) {
    torch::manual_seed(2);
    std::mt19937 random(3);
    const std::vector<Placements> lists = lists_of(
        {Shard(0), Shard(1), Replicate(), Partial(), Partial(ReduceOp::kAvg)}, shape.size());
    std::vector<Trial> trials;
    for (int i = 0; i < 200; ++i) {
      const Placements& from = lists[random() % lists.size()];
      const Placements& to = lists[random() % lists.size()];
      trials.push_back(trial_of(shape, kSizes[random() % kSizes.size()], from, to));
    }
    check_trials(shape, std::move(trials));
    if (HasFatalFailure()) return;
  }
}

// Only the forward is tested, because these reductions or dtypes have no derivative.
TEST(Redistribute, EveryReductionOfTheDtype) {
  // The world sizes are even and odd, because the xor of an odd number of equal operands is the
  // operand itself.
  const auto check_on = [](int num_ranks, torch::Dtype dtype, const std::vector<ReduceOp>& ops) {
    std::vector<Trial> trials;
    for (const ReduceOp op : ops) {
      const Placements partial = {Partial(op)};
      for (const Placements& other :
           {Placements{Shard(0)}, {Shard(1)}, {Replicate()}, {Partial(ops.front())}, partial}) {
        for (const auto& [from, to] : {std::pair(partial, other), std::pair(other, partial)}) {
          const std::vector<int64_t> sizes = {5, 3};
          trials.push_back(
              {.sizes = sizes,
               .from = from,
               .to = to,
               .operands = small_numbers(operand_sizes(sizes, {num_ranks}, from), dtype)});
        }
      }
    }
    check_trials({num_ranks}, std::move(trials));
  };
  const auto check = [&](torch::Dtype dtype, const std::vector<ReduceOp>& ops) {
    for (const int num_ranks : {2, 3}) check_on(num_ranks, dtype, ops);
  };
  torch::manual_seed(4);
  using enum ReduceOp;
  check(torch::kDouble, {kSum, kAvg, kMin, kMax, kProduct});
  check(torch::kLong, {kSum, kMin, kMax, kProduct, kBand, kBor, kBxor});
  check(torch::kBool, {kMax, kMin, kBand, kBor, kBxor});
  check(torch::kBFloat16, {kSum, kMin, kMax});
}

// The sizes cover both ways to gather on 4 ranks: 50 rows are padded to equal chunks for an
// all_gather, and 5 rows are sent without padding by an all_to_all.
TEST(Redistribute, PaddedAndUnpaddedGathers) {
  torch::manual_seed(5);
  std::vector<Trial> trials;
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{50, 3}, {3, 50}, {48, 2}, {5, 8}, {17, 17}}) {
    for (const Placements& from : {Placements{Shard(0)}, {Shard(1)}, {Partial()}}) {
      for (const Placements& to : {Placements{Shard(0)}, {Shard(1)}, {Replicate()}}) {
        trials.push_back(trial_of({4}, sizes, from, to));
      }
    }
  }
  check_trials({4}, std::move(trials));
}

// The "replicas" have different values here, which shows from which replica each element comes: a
// rank must receive it from the rank with its own coordinate along the replicated axis.
TEST(Redistribute, ElementsComeFromTheReplicaAtTheOwnCoordinate) {
  const auto result = run_groups(4, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, axes_of({2, 2}));
    const int row = mesh.coordinates()[0];
    const int column = mesh.coordinates()[1];
    const Tensor local = torch::arange(2 * column, 2 * column + 2) + 10 * row;
    const DTensor halves = DTensor::from_local(local, mesh, {Replicate(), Shard(0)}, {4});
    const DTensor quarters = halves.redistribute({Shard(0), Shard(0)});
    const int64_t expected = 2 * row + column + 10 * row;
    testing::require(quarters.local().item<int64_t>() == expected, "of the own row");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(LocalBox, IsTheChunkThatTorchCuts) {
  const Placements choices = {Shard(0), Shard(1), Shard(-1), Replicate(), Partial()};
  for (const std::vector<int>& shape :
       {std::vector<int>{1}, {2}, {3}, {4}, {7}, {2, 2}, {2, 3}, {3, 2}, {2, 2, 2}}) {
    for (const std::vector<int64_t>& sizes : kSizes) {
      const Tensor full = torch::arange(sizes[0] * sizes[1]).view(sizes);
      for (const Placements& placements : lists_of(choices, shape.size())) {
        for (int rank = 0; rank < num_ranks_of(shape); ++rank) {
          const std::vector<int> coordinates = coordinates_in(shape, rank);
          const Box box = local_box(sizes, shape, coordinates, placements);
          const Tensor part =
              full.narrow(0, box.offsets[0], box.sizes[0]).narrow(1, box.offsets[1], box.sizes[1]);
          const Tensor expected = reference_part(full, shape, coordinates, placements);
          ASSERT_TRUE(torch::equal(part, expected)) << to_string(std::span(placements));
          ASSERT_EQ(box.numel(), expected.numel());
        }
      }
    }
  }
  // 7 elements are divided among 4 ranks into chunks of 2, 2, 2 and 1, and 5 elements into chunks
  // of 2, 2, 1 and 0.
  const std::vector<int64_t> five = {5};
  const std::vector<int> four = {4};
  const Placements rows = {Shard(0)};
  EXPECT_EQ(local_box(five, four, std::vector<int>{2}, rows), (Box{{4}, {1}}));
  EXPECT_EQ(local_box(five, four, std::vector<int>{3}, rows), (Box{{5}, {0}}));
}

}  // namespace
}  // namespace cadre
