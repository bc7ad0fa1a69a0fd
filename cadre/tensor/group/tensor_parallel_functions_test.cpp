// Compares Megatron's conjugate functions f and g with one process, and tests the errors of the
// differentiable collectives. Ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

// Returns deterministic values of the magnitude of weights, from a smooth function of the index.
Tensor filled(at::IntArrayRef shape, double seed) {
  const int64_t count = c10::multiply_integers(shape);
  return (torch::arange(count, torch::kDouble) * 0.7 + seed).sin().view(shape) * 0.5;
}

// Computes gelu(x W1^T + b1) W2^T + b2 for x of (4, 6). The weights have the sizes (12, 6), (12),
// (5, 12) and (5).
struct Mlp {
  Tensor x = filled({4, 6}, 1);
  Tensor w1 = filled({12, 6}, 2);
  Tensor b1 = filled({12}, 3);
  Tensor w2 = filled({5, 12}, 4);
  Tensor b2 = filled({5}, 5);

  Tensors leaves() {
    Tensors all = {x, w1, b1, w2, b2};
    for (Tensor& tensor : all) tensor.requires_grad_(true);
    return all;
  }
  // Returns one rank's shard of the MLP: rows of the first weight and columns of the second.
  static Mlp part(int rank, int world_size) {
    const int64_t size = 12 / world_size;
    Mlp mlp;
    mlp.w1 = mlp.w1.narrow(0, rank * size, size).clone();
    mlp.b1 = mlp.b1.narrow(0, rank * size, size).clone();
    mlp.w2 = mlp.w2.narrow(1, rank * size, size).clone();
    return mlp;
  }
};

Tensor mean_square(const Tensor& y) {
  return torch::mse_loss(y, filled({4, 5}, 6));
}

Tensor hidden(const Tensor& x, const Mlp& mlp) {
  return torch::gelu(torch::linear(x, mlp.w1, mlp.b1));
}

Tensor loss_in_one(const Mlp& mlp) {
  return mean_square(torch::linear(hidden(mlp.x, mlp), mlp.w2) + mlp.b2);
}

// Computes the loss of the sharded MLP: a column-parallel layer, then a row-parallel layer.
Tensor loss_on_ranks(const Mlp& mlp, const ProcessGroup& group) {
  const Tensor h = hidden(functional::copy_to_group(mlp.x, group), mlp);
  return mean_square(functional::reduce_from_group(torch::linear(h, mlp.w2), group) + mlp.b2);
}

// Returns this rank's shards of the gradients of the whole MLP.
Tensors parts_of(const Tensors& gradients, int rank, int world_size) {
  const int64_t size = 12 / world_size;
  Tensors parts = gradients;
  parts[1] = parts[1].narrow(0, rank * size, size);
  parts[2] = parts[2].narrow(0, rank * size, size);
  parts[3] = parts[3].narrow(1, rank * size, size);
  return parts;
}

void require_all_close(const Tensors& actual, const Tensors& expected, const std::string& what) {
  require(actual.size() == expected.size(), what);
  for (size_t i = 0; i < actual.size(); ++i) {
    require(actual[i].sizes() == expected[i].sizes() &&
                torch::allclose(actual[i], expected[i], 1e-12, 1e-13),
            what + " " + std::to_string(i));
  }
}

class TensorParallel : public ::testing::TestWithParam<int> {
 protected:
  void expect_on_all(const std::function<void(const ProcessGroup&)>& body) {
    const testing::RanksResult result = run_groups(GetParam(), body);
    EXPECT_TRUE(result.ok()) << result.failures();
  }
};

INSTANTIATE_TEST_SUITE_P(Functional, TensorParallel, ::testing::Values(1, 2, 3, 4));

TEST_P(TensorParallel, AnMlpEqualsOneProcess) {
  Mlp whole;
  const Tensors leaves = whole.leaves();
  const Tensor loss = loss_in_one(whole);
  const Tensors gradients = torch::autograd::grad({loss}, leaves);
  expect_on_all([&](const ProcessGroup& group) {
    const int n = group.world_size();
    Mlp mlp = Mlp::part(group.rank(), n);
    const Tensors mine = mlp.leaves();
    const Tensor result = loss_on_ranks(mlp, group);
    require_all_close({result.detach()}, {loss.detach()}, "loss");
    require_all_close(torch::autograd::grad({result}, mine), parts_of(gradients, group.rank(), n),
                      "gradient");
  });
}

// The backward of f is g and the backward of g is f, so a second backward works too: a loss that
// contains the norm of the input's gradient must have the right gradients.
TEST_P(TensorParallel, AGradientPenaltyEqualsOneProcess) {
  const auto penalty = [](const Tensor& loss, const Tensor& x) {
    return torch::autograd::grad({loss}, {x}, {}, true, true)[0].square().sum();
  };
  Mlp whole;
  const Tensors leaves = whole.leaves();
  const auto gradients = torch::autograd::grad({penalty(loss_in_one(whole), whole.x)}, leaves);
  expect_on_all([&](const ProcessGroup& group) {
    const int n = group.world_size();
    Mlp mlp = Mlp::part(group.rank(), n);
    const Tensors mine = mlp.leaves();
    require_all_close(torch::autograd::grad({penalty(loss_on_ranks(mlp, group), mlp.x)}, mine),
                      parts_of(gradients, group.rank(), n), "gradient");
  });
}

// Tests each dimension, counted from either end: scatter_to_group divides the hidden features, and
// gather_from_group joins them.
TEST_P(TensorParallel, ScatteredAndGatheredAlongADimension) {
  for (const int64_t dim : {0, 1, 2, -1, -3}) {
    const Tensor x = filled({12, 24, 12}, 1).requires_grad_(true);
    const auto loss_of = [](const Tensor& y) { return (y * filled({12, 24, 12}, 2)).pow(2).sum(); };
    const Tensor y = x.sin();
    const Tensor loss = loss_of(y);
    const Tensor gradient = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
    const Tensor second = torch::autograd::grad({gradient.pow(2).sum()}, {x})[0];
    expect_on_all([&](const ProcessGroup& group) {
      const Tensor input = x.detach().clone().requires_grad_(true);
      const Tensor part = functional::scatter_to_group(input, group, {.dim = dim});
      require(
          torch::equal(part.detach(), x.detach().chunk(group.world_size(),
                                                       dim)[static_cast<size_t>(group.rank())]) &&
              part.is_contiguous(),
          "scattered");
      Tensor whole = functional::gather_from_group(part.sin(), group, {.dim = dim});
      require(torch::equal(whole.detach(), y.detach()) && whole.is_contiguous(), "gathered");
      whole.mul_(-1).mul_(-1);
      const Tensor actual = torch::autograd::grad({loss_of(whole)}, {input}, {}, true, true)[0];
      require_all_close({actual.detach()}, {gradient.detach()}, "gradient");
      require_all_close(torch::autograd::grad({actual.pow(2).sum()}, {input}), {second}, "second");
    });
  }
}

TEST_P(TensorParallel, CopyToGroupCommunicatesOnlyForAGradient) {
  expect_on_all([](const ProcessGroup& group) {
    const uint64_t before = group.communicator().num_collectives();
    const Tensor data = filled({3}, 1);
    require(functional::copy_to_group(data, group).is_same(data), "of data");
    const Tensor x = filled({3}, 1).requires_grad_(true);
    {
      const torch::NoGradGuard no_grad;
      require(functional::copy_to_group(x, group).is_same(x), "without grad mode");
    }
    const Tensor y = functional::copy_to_group(x, group);
    require(y.is_alias_of(x), "a copy");
    require(group.communicator().num_collectives() == before, "forward");
    // Each rank contributes a different gradient. The backward must sum them.
    (y * (group.rank() + 1)).sum().backward();
    const int n = group.world_size();
    require(torch::equal(x.grad(), torch::full({3}, n * (n + 1) / 2.0, torch::kDouble)), "sum");
    require(group.communicator().num_collectives() == before + 1, "backward");
  });
}

// If the result of copy_to_group() or its input were changed in place, autograd would lose the
// backward of the function. So autograd must throw at the change.
TEST(Functional, CopyToGroupIsNotChangedInPlace) {
  constexpr auto kSentence = "You can fix this by cloning the output of the custom Function";
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const Tensor x = filled({3}, 1).requires_grad_(true);
    const Tensor y = functional::copy_to_group(x, group);
    require(failure_of([&] { y.mul_(2); }).find(kSentence) != std::string::npos, "view");
    const Tensor base = x * 2;
    const Tensor view = functional::copy_to_group(base, group);
    const std::string failure = failure_of([&] {
      base.mul_(2);
      view.sum().backward();
    });
    require(failure.find(kSentence) != std::string::npos, failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The graph keeps the group alive, also after the program has destroyed its handle.
TEST(Functional, TheGraphKeepsTheGroup) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const Tensor x = torch::ones({2}, torch::kDouble).requires_grad_(true);
    Tensor y;
    {
      const auto pair = group.split({.color = 0, .name = "pair"});
      y = functional::all_gather(x, *pair);
    }
    y.sum().backward();
    require(torch::equal(x.grad(), torch::full({2}, 2.0, torch::kDouble)), "gradient");
    // The backward must throw after close().
    const auto pair = group.split({.color = 0, .name = "pair"});
    y = functional::all_gather(x, *pair);
    pair->close();
    const std::string failure = failure_of([&] { y.sum().backward(); });
    require(failure.find("backward of all_gather: ") != std::string::npos &&
                failure.find("closed") != std::string::npos,
            failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Megatron's functions (copy_to_group and others) differentiate one loss that all ranks compute.
// The other functions (all_gather and others) differentiate the sum of the ranks' losses. So their
// gradients differ by the factor world_size.
TEST(Functional, TheTwoMeaningsDifferByTheWorldSize) {
  const auto result = run_groups(3, [](const ProcessGroup& group) {
    const Tensor x = torch::ones({2}, torch::kDouble).requires_grad_(true);
    functional::reduce_from_group(x, group).sum().backward();
    require(torch::equal(x.grad(), torch::ones({2}, torch::kDouble)), "one loss");
    x.mutable_grad() = Tensor();
    functional::all_reduce(x, group).sum().backward();
    require(torch::equal(x.grad(), torch::full({2}, 3.0, torch::kDouble)), "three losses");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

using Call = std::function<Tensor(const Tensor&, const ProcessGroup&)>;

struct RefusedCall {
  const char* name;
  Tensor input;
  Call call;
  const char* sentence;
};

// Returns calls that a group of 2 refuses.
std::vector<RefusedCall> refused_calls() {
  const Tensor ones = torch::ones({4, 2}, torch::kDouble);
  return {
      {"product", ones,
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::all_reduce(x, group, {.op = ReduceOp::kProduct});
       },
       "product has no backward; all_gather the inputs and multiply them: view({world_size, "
       "...}).prod(0), or call it under torch::NoGradGuard"},
      {"reduce_scatter max", ones,
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::reduce_scatter(x, group, {.op = ReduceOp::kMax});
       },
       "max has no backward; exchange the parts with all_to_all and reduce them: "
       "view({world_size, ...}).amax(0), .amin(0) or .prod(0), or call it under "
       "torch::NoGradGuard"},
      {"reduce_scatter of 3 rows", ones.narrow(0, 0, 3),
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::reduce_scatter(x, group);
       },
       "dimension 0 of the input (3, 2) is no multiple of the world size 2; pad it"},
      {"reduce_scatter of a number", ones[0][0],
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::reduce_scatter(x, group);
       },
       "the input () has no dimension 0; pass view({1})"},
      {"scatter_to_group along a wrong dimension", ones,
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::scatter_to_group(x, group, {.dim = 2});
       },
       "the input (4, 2) has no dimension 2; pass a dimension from -2 to 1"},
      {"gather_from_group of a number", ones[0][0],
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::gather_from_group(x, group);
       },
       "the input () has no dimension -1; pass view({1})"},
      {"all_to_all of a number", ones[0][0],
       [](const Tensor& x, const ProcessGroup& group) { return functional::all_to_all(x, group); },
       "the input has no dimension 0 to be split; pass view({1})"},
      {"all_to_all with a negative split", ones,
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::all_to_all(x, group, {.output_split_sizes = {-1, 3}});
       },
       "the output (3, 2) has a split of -1 rows, but 3 rows are left"},
      {"nothing", Tensor(),
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::copy_to_group(x, group);
       },
       "copy_to_group on group \"world\", rank 0: the input is undefined; pass one with data"},
      {"sparse", ones.to_sparse(),
       [](const Tensor& x, const ProcessGroup& group) { return functional::broadcast(x, group); },
       "the input (4, 2) is sparse"},
  };
}

// Every rank throws before any data is sent, so the group stays usable.
TEST(Functional, WhatHasNoBackwardIsRefused) {
  const std::vector<RefusedCall> cases = refused_calls();
  const Tensor ones = torch::ones({4, 2}, torch::kDouble);
  std::vector<std::string> failures(cases.size());
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    for (size_t i = 0; i < cases.size(); ++i) {
      const std::string failure = failure_of([&] { cases[i].call(cases[i].input, group); });
      require(!failure.empty(), cases[i].name);
      if (group.rank() == 0) failures[i] = failure;
    }
    const torch::NoGradGuard no_grad;
    const Tensor product = functional::all_reduce(ones * 2, group, {.op = ReduceOp::kProduct});
    require(torch::equal(product, ones * 4), "without grad mode");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_THAT(failures[i], AllOf(HasSubstr("kInvalidArgument"), HasSubstr(cases[i].sentence)))
        << cases[i].name;
  }
}

TEST(Functional, ATangentIsRefusedInsteadOfLost) {
  const auto result = run_groups(1, [](const ProcessGroup& group) {
    const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
    const Tensor dual =
        torch::_make_dual(torch::ones({2}), torch::ones({2}), static_cast<int64_t>(level));
    const std::string failure = failure_of([&] { functional::all_reduce(dual, group); });
    torch::autograd::ForwardADLevel::release_idx(level);
    require(failure.find("carries a tangent of forward-mode differentiation") != std::string::npos,
            failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// all_reduce with MAX saves a mask for its backward. The backward frees it, so a second backward
// throws, as for any operator of PyTorch.
TEST(Functional, WhatIsSavedIsFreedByBackward) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const Tensor x = torch::ones({2}, torch::kDouble).requires_grad_(true);
    const Tensor sum = functional::all_reduce(x, group, {.op = ReduceOp::kMax}).sum();
    sum.backward();
    const std::string failure = failure_of([&] { sum.backward(); });
    require(failure.find("backward through the graph a second time") != std::string::npos, failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Rank 1 calls another operation instead of the backward of its all_gather. The error must name
// both operations.
TEST(Functional, ARankThatLeavesOutABackwardIsNamed) {
  std::vector<std::string> failures(2);
  run_groups(2, [&](const ProcessGroup& group) {
    const Tensor x = torch::ones({2}, torch::kDouble).requires_grad_(true);
    const Tensor y = functional::all_gather(x, group);
    failures[static_cast<size_t>(group.rank())] = failure_of([&] {
      if (group.rank() == 0) y.sum().backward();
      group.barrier();
    });
  });
  EXPECT_THAT(failures[0], AllOf(HasSubstr("backward of all_gather: reduce_scatter #2 on group"),
                                 HasSubstr("barrier")));
  EXPECT_THAT(failures[1], AllOf(HasSubstr("barrier #2"), HasSubstr("reduce_scatter")));
}

// Rank 1 leaves out the backward and calls no other operation. The timeout error must name the
// operation and the rank.
TEST(Functional, ARankThatLeavesOutABackwardIsNamedAtTheDeadline) {
  const auto system = os::make_native_system();
  const auto store = std::make_shared<HashStore>(*system);
  std::promise<void> has_failed;
  std::string failure;
  std::optional<ErrorCode> code;
  const auto result = testing::run_ranks_as_threads(2, [&](testing::RankContext& context) {
    at::set_num_threads(1);
    const ProcessGroup group(Communicator::connect(
        context.system,
        {.rank = context.rank, .world_size = 2, .store = store, .job_token = "test"},
        {.timeout = std::chrono::milliseconds(500)},
        context.system.deadline_in(testing::kRankTimeout)));
    const Tensor x = torch::ones({2}, torch::kDouble).requires_grad_(true);
    const Tensor y = functional::broadcast(x, group, {.timeout = testing::kRankTimeout});
    if (context.rank == 1) {
      has_failed.get_future().wait_for(testing::kRankTimeout);
      return;
    }
    try {
      y.sum().backward();
    } catch (const Error& error) {
      code = error.code();
      failure = error.message();
    }
    has_failed.set_value();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(code, ErrorCode::kTimeout);
  EXPECT_THAT(failure, AllOf(HasSubstr("backward of broadcast: reduce #2 on group \"world\""),
                             HasSubstr("waiting for rank 1"), HasSubstr("broadcast #1")));
}

}  // namespace
}  // namespace cadre
