// Compares the differentiable collectives, on ranks that are threads, with one process: the
// reference is the same computation on the inputs of all ranks, with plain operators of PyTorch in
// double and their autograd.
#include "cadre/tensor/group/backward/differentiable.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::require;
using testing::run_groups;
using torch::Tensor;
using Tensors = std::vector<Tensor>;

// Returns multiples of 1/4, which every dtype represents exactly. There are few different values,
// so that several ranks have the same extremum.
Tensor values(int rank, at::IntArrayRef shape, int64_t seed = 0) {
  const int64_t count = c10::multiply_integers(shape);
  const Tensor counted = torch::arange(count, torch::kDouble) * 5 + rank * 7 + seed * 3;
  return (counted.fmod(11).div(2).floor() / 4 - 0.5).view(shape);
}

// A collective as a call on one rank, and its reference: a function of the inputs of all ranks.
struct DifferentiableCall {
  std::string name;
  std::function<std::vector<int64_t>(int rank, int world_size)> shape;
  std::function<Tensor(const Tensor&, const ProcessGroup&)> on_ranks;
  std::function<Tensors(const Tensors&)> in_one;
  bool is_linear = true;
};

Tensors copies(const Tensor& tensor, size_t count) {
  Tensors result;
  for (size_t i = 0; i < count; ++i) result.push_back(tensor.clone());
  return result;
}

Tensors slices(const Tensor& tensor, size_t count) {
  return tensor.chunk(static_cast<int64_t>(count));
}

Tensor premultiplied(const Tensors& inputs) {
  Tensor sum = torch::zeros_like(inputs[0]);
  for (size_t i = 0; i < inputs.size(); ++i) sum = sum + inputs[i] * (0.5 + static_cast<double>(i));
  return sum;
}

// Returns the number of rows that rank `from` sends to rank `to`; some pairs exchange no rows.
int64_t rows_between(int from, int to) {
  return (from * 2 + to) % 4;
}

std::vector<int64_t> splits(int world_size, const std::function<int64_t(int)>& rows) {
  std::vector<int64_t> result;
  for (int rank = 0; rank < world_size; ++rank) result.push_back(rows(rank));
  return result;
}

Tensors exchanged(const Tensors& inputs, const std::function<int64_t(int, int)>& rows) {
  const int world_size = static_cast<int>(inputs.size());
  std::vector<Tensors> received(inputs.size());
  for (int from = 0; from < world_size; ++from) {
    int64_t begin = 0;
    for (int to = 0; to < world_size; ++to) {
      const Tensor part = inputs[static_cast<size_t>(from)].narrow(0, begin, rows(from, to));
      received[static_cast<size_t>(to)].push_back(part);
      begin += rows(from, to);
    }
  }
  Tensors result;
  for (const Tensors& parts : received) result.push_back(torch::cat(parts));
  return result;
}

Tensor uneven_all_to_all(const Tensor& x, const ProcessGroup& group) {
  const int me = group.rank();
  const int size = group.world_size();
  return functional::all_to_all(
      x, group,
      {.output_split_sizes = splits(size, [&](int from) { return rows_between(from, me); }),
       .input_split_sizes = splits(size, [&](int to) { return rows_between(me, to); })});
}

std::vector<DifferentiableCall> reductions() {
  const auto same = [](int, int) { return std::vector<int64_t>{4, 3}; };
  const auto reduced = [](ReduceOp op) {
    return [op](const Tensor& x, const ProcessGroup& group) {
      return functional::all_reduce(x, group, {.op = op});
    };
  };
  const auto stacked = [](Tensor (*reduce)(const Tensor&)) {
    return [reduce](const Tensors& all) { return copies(reduce(torch::stack(all)), all.size()); };
  };
  return {
      {"sum", same, reduced(ReduceOp::kSum), stacked([](const Tensor& t) { return t.sum(0); })},
      {"avg", same, reduced(ReduceOp::kAvg), stacked([](const Tensor& t) { return t.mean(0); })},
      {"max", same, reduced(ReduceOp::kMax), stacked([](const Tensor& t) { return t.amax(0); }),
       false},
      {"min", same, reduced(ReduceOp::kMin), stacked([](const Tensor& t) { return t.amin(0); }),
       false},
      {"premul_sum", same,
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::all_reduce(x, group, {.op = Reduction::premul_sum(0.5 + group.rank())});
       },
       [](const Tensors& all) { return copies(premultiplied(all), all.size()); }},
      {"sum of a number", [](int, int) { return std::vector<int64_t>{}; }, reduced(ReduceOp::kSum),
       stacked([](const Tensor& t) { return t.sum(0); })},
      {"sum of nothing",
       [](int, int) {
         return std::vector<int64_t>{0, 3};
       },
       reduced(ReduceOp::kSum), stacked([](const Tensor& t) { return t.sum(0); })},
  };
}

std::vector<DifferentiableCall> exchanges() {
  const auto large = [](int, int world_size) { return std::vector<int64_t>{2 * world_size, 3}; };
  const auto same = [](int, int) { return std::vector<int64_t>{4, 3}; };
  const auto scattered = [](ReduceOp op) {
    return [op](const Tensor& x, const ProcessGroup& group) {
      const Reduction premul = Reduction::premul_sum(0.5 + group.rank());
      return functional::reduce_scatter(x, group, {.op = op == ReduceOp::kPremulSum ? premul : op});
    };
  };
  const auto gathered = [](const Tensor& x, const ProcessGroup& group) {
    return functional::all_gather(x, group);
  };
  return {
      {"all_gather", same, gathered,
       [](const Tensors& all) { return copies(torch::cat(all), all.size()); }},
      {"all_gather of a number", [](int, int) { return std::vector<int64_t>{}; }, gathered,
       [](const Tensors& all) { return copies(torch::stack(all), all.size()); }},
      {"reduce_scatter sum", large, scattered(ReduceOp::kSum),
       [](const Tensors& all) { return slices(torch::stack(all).sum(0), all.size()); }},
      {"reduce_scatter avg", large, scattered(ReduceOp::kAvg),
       [](const Tensors& all) { return slices(torch::stack(all).mean(0), all.size()); }},
      {"reduce_scatter premul_sum", large, scattered(ReduceOp::kPremulSum),
       [](const Tensors& all) { return slices(premultiplied(all), all.size()); }},
      {"all_to_all even", large,
       [](const Tensor& x, const ProcessGroup& group) { return functional::all_to_all(x, group); },
       [](const Tensors& all) { return exchanged(all, [](int, int) { return 2; }); }},
      {"all_to_all uneven",
       [](int rank, int world_size) {
         const auto sent = splits(world_size, [&](int to) { return rows_between(rank, to); });
         return std::vector<int64_t>{std::accumulate(sent.begin(), sent.end(), int64_t{0}), 3};
       },
       uneven_all_to_all, [](const Tensors& all) { return exchanged(all, rows_between); }},
      // Rank r sends r rows to each rank. So its input is divided evenly, and only the splits of
      // the output are given.
      {"all_to_all with output splits",
       [](int rank, int world_size) {
         return std::vector<int64_t>{rank * world_size, 3};
       },
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::all_to_all(
             x, group, {.output_split_sizes = splits(group.world_size(), [](int from) {
                          return int64_t{from};
                        })});
       },
       [](const Tensors& all) { return exchanged(all, [](int from, int) { return from; }); }},
      {"broadcast", same,
       [](const Tensor& x, const ProcessGroup& group) {
         return functional::broadcast(x, group, {.root = group.world_size() - 1});
       },
       [](const Tensors& all) { return copies(all.back(), all.size()); }},
  };
}

std::vector<DifferentiableCall> all_collectives() {
  std::vector<DifferentiableCall> all = reductions();
  for (DifferentiableCall& exchange : exchanges()) all.push_back(std::move(exchange));
  return all;
}

// Returns the loss of a rank: the result weighted with values that differ between ranks.
Tensor loss_of(const Tensor& result, int rank) {
  const Tensor weights = values(rank, result.sizes(), 4).to(result.scalar_type());
  return (weights * result + (rank + 1) * result * result).sum();
}

// The results of the reference: the inputs of all ranks as leaves in double, the outputs, and the
// sum of the ranks' losses.
struct Truth {
  Tensors inputs;
  Tensors results;
  Tensor objective;

  Truth(const DifferentiableCall& collective, int world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      inputs.push_back(values(rank, collective.shape(rank, world_size)).requires_grad_(true));
    }
    results = collective.in_one(inputs);
    objective = torch::zeros({}, torch::kDouble);
    for (int rank = 0; rank < world_size; ++rank) {
      objective = objective + loss_of(results[static_cast<size_t>(rank)], rank);
    }
  }
  Tensor gradient(int rank, bool create_graph = false) const {
    return torch::autograd::grad({objective}, {inputs[static_cast<size_t>(rank)]}, {}, true,
                                 create_graph, /*allow_unused=*/true)[0];
  }
};

void require_close(const Tensor& actual, const Tensor& expected, double tolerance,
                   const std::string& what) {
  require(actual.defined(), what + ": undefined");
  require(actual.sizes() == expected.sizes(), what + ": shape");
  const bool is_close = torch::allclose(actual.to(torch::kDouble), expected, tolerance, tolerance);
  std::ostringstream text;
  if (!is_close) text << what << ":\n" << actual << "\nexpected\n" << expected;
  require(is_close, text.str());
}

// Returns the gradient, or zeros if it is undefined in the reference because the loss does not
// depend on the input.
Tensor or_zeros(const Tensor& gradient, const Tensor& input) {
  return gradient.defined() ? gradient : torch::zeros_like(input);
}

class Differentiable : public ::testing::TestWithParam<int> {
 protected:
  // Calls body(collective, reference results, group) on all ranks, for each collective.
  void expect_of_each(const std::function<void(const DifferentiableCall&, const Truth&,
                                               const ProcessGroup&)>& body) {
    const testing::RanksResult result = run_groups(GetParam(), [&](const ProcessGroup& group) {
      for (const DifferentiableCall& collective : all_collectives()) {
        body(collective, Truth(collective, group.world_size()), group);
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
  void expect_on_all(const std::function<void(const ProcessGroup&)>& body) {
    const testing::RanksResult result = run_groups(GetParam(), body);
    EXPECT_TRUE(result.ok()) << result.failures();
  }
};

INSTANTIATE_TEST_SUITE_P(Functional, Differentiable, ::testing::Values(1, 2, 3, 4));

Tensor leaf(const Truth& truth, int rank, at::ScalarType type = torch::kDouble) {
  return truth.inputs[static_cast<size_t>(rank)].detach().to(type).clone().requires_grad_(true);
}

TEST_P(Differentiable, ResultsAndGradientsEqualOneProcess) {
  expect_of_each(
      [](const DifferentiableCall& collective, const Truth& truth, const ProcessGroup& group) {
        const int rank = group.rank();
        // The values are exact in every dtype; bfloat16 rounds losses and gradients to 2^-8.
        for (const auto& [type, tolerance] :
             {std::pair(torch::kDouble, 1e-12), std::pair(torch::kFloat, 1e-5),
              std::pair(torch::kBFloat16, 0.05)}) {
          const std::string what = collective.name + " of " + c10::toString(type);
          const Tensor input = leaf(truth, rank, type);
          const Tensor result = collective.on_ranks(input, group);
          require(result.scalar_type() == type && result.is_contiguous(), what);
          require_close(result.detach(), truth.results[static_cast<size_t>(rank)].detach(),
                        tolerance, what);
          loss_of(result, rank).backward();
          require_close(input.grad(),
                        or_zeros(truth.gradient(rank), truth.inputs[static_cast<size_t>(rank)]),
                        tolerance, what + ", gradient");
        }
      });
}

// The loss contains a penalty on the gradients: the sum of the squared gradients of all ranks.
TEST_P(Differentiable, GradientsOfGradientsEqualOneProcess) {
  expect_of_each(
      [](const DifferentiableCall& collective, const Truth& truth, const ProcessGroup& group) {
        const int rank = group.rank();
        Tensor penalty = torch::zeros({}, torch::kDouble);
        for (int other = 0; other < group.world_size(); ++other) {
          const Tensor gradient = truth.gradient(other, /*create_graph=*/true);
          if (gradient.defined()) penalty = penalty + loss_of(gradient, other);
        }
        const Tensor expected = torch::autograd::grad(
            {penalty}, {truth.inputs[static_cast<size_t>(rank)]}, {}, true, false, true)[0];

        const Tensor input = leaf(truth, rank);
        const Tensor loss = loss_of(collective.on_ranks(input, group), rank);
        const Tensor gradient = torch::autograd::grad({loss}, {input}, {}, true, true)[0];
        loss_of(gradient, rank).backward();
        require_close(input.grad(), or_zeros(expected, input), 1e-12, collective.name);
      });
}

// One rank after the other has an input that does not require grad. That rank must take part in the
// collective of the backward nevertheless.
TEST_P(Differentiable, ARankWithoutAGradientTakesPartInBackward) {
  expect_of_each([](const DifferentiableCall& collective, const Truth& truth,
                    const ProcessGroup& group) {
    const int rank = group.rank();
    for (int frozen = 0; frozen < group.world_size(); ++frozen) {
      const Tensor input = leaf(truth, rank).detach().requires_grad_(rank != frozen);
      const Tensor result = collective.on_ranks(input, group);
      require(result.requires_grad(), collective.name);
      loss_of(result, rank).backward();
      if (rank == frozen) {
        require(!input.grad().defined(), collective.name);
      } else {
        require_close(input.grad(), or_zeros(truth.gradient(rank), input), 1e-12, collective.name);
      }
    }
  });
}

// The input is transposed, and the incoming gradient is that of sum(), an expanded scalar. So
// neither is contiguous.
TEST_P(Differentiable, InputsAndGradientsNeedNotBeContiguous) {
  expect_of_each(
      [](const DifferentiableCall& collective, const Truth& truth, const ProcessGroup& group) {
        const int rank = group.rank();
        const Tensor mine = truth.inputs[static_cast<size_t>(rank)];
        Tensor sum = torch::zeros({}, torch::kDouble);
        for (const Tensor& result : truth.results) sum = sum + result.sum();
        const Tensor expected = torch::autograd::grad({sum}, {mine}, {}, true, false, true)[0];

        const Tensor transposed = mine.detach().t().contiguous().requires_grad_(true);
        const Tensor result = collective.on_ranks(transposed.t(), group);
        result.sum().backward();
        require_close(result.detach(), truth.results[static_cast<size_t>(rank)].detach(), 1e-12,
                      collective.name);
        require_close(transposed.grad().t(), or_zeros(expected, mine), 1e-12, collective.name);
      });
}

TEST_P(Differentiable, AGraphThatIsKeptGoesBackTwice) {
  expect_of_each(
      [](const DifferentiableCall& collective, const Truth& truth, const ProcessGroup& group) {
        const Tensor input = leaf(truth, group.rank());
        const Tensor loss = loss_of(collective.on_ranks(input, group), group.rank());
        loss.backward({}, /*retain_graph=*/true);
        loss.backward();
        require_close(input.grad(), 2 * or_zeros(truth.gradient(group.rank()), input), 1e-12,
                      collective.name);
      });
}

// If the program changes the result in place, the input and the tensors saved for backward stay
// unchanged.
TEST_P(Differentiable, AResultMayBeChangedInPlace) {
  expect_of_each(
      [](const DifferentiableCall& collective, const Truth& truth, const ProcessGroup& group) {
        const int rank = group.rank();
        const Tensor input = leaf(truth, rank);
        Tensor result = collective.on_ranks(input, group);
        require(!result.is_alias_of(input), collective.name);
        result.mul_(-1).mul_(-1);
        loss_of(result, rank).backward();
        require(torch::equal(input.detach(), truth.inputs[static_cast<size_t>(rank)].detach()),
                collective.name);
        require_close(input.grad(), or_zeros(truth.gradient(rank), input), 1e-12, collective.name);
      });
}

// A function whose backward returns an undefined gradient, which counts as zero.
struct DropGradient : torch::autograd::Function<DropGradient> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {Tensor()};
  }
};

TEST_P(Differentiable, AnUndefinedGradientIsZeroAndTakesPart) {
  expect_of_each([](const DifferentiableCall& collective, const Truth& truth,
                    const ProcessGroup& group) {
    const int rank = group.rank();
    Tensor others = torch::zeros({}, torch::kDouble);  // the losses of all ranks except rank 0
    for (int other = 1; other < group.world_size(); ++other) {
      others = others + loss_of(truth.results[static_cast<size_t>(other)], other);
    }
    const Tensor mine = truth.inputs[static_cast<size_t>(rank)];
    const Tensor expected = group.world_size() == 1
                                ? Tensor()
                                : torch::autograd::grad({others}, {mine}, {}, true, false, true)[0];
    const Tensor input = leaf(truth, rank);
    Tensor result = collective.on_ranks(input, group);
    if (rank == 0) result = DropGradient::apply(result);
    loss_of(result, rank).backward();
    require_close(input.grad(), or_zeros(expected, mine), 1e-12, collective.name);
  });
}

TEST_P(Differentiable, WithoutGradModeAndOfIntegersThereIsNoGraph) {
  expect_of_each([](const DifferentiableCall& collective, const Truth& truth,
                    const ProcessGroup& group) {
    const int rank = group.rank();
    const Tensor input = leaf(truth, rank);
    {
      const torch::NoGradGuard no_grad;
      const Tensor result = collective.on_ranks(input, group);
      require(!result.requires_grad(), collective.name);
      require_close(result, truth.results[static_cast<size_t>(rank)].detach(), 1e-12,
                    collective.name);
    }
    // AVG and PREMUL_SUM with a real factor are not defined for integers.
    if (collective.name.find("avg") != std::string::npos) return;
    if (collective.name.find("premul") != std::string::npos) return;
    const Tensor counts = (truth.inputs[static_cast<size_t>(rank)].detach() * 4).to(torch::kLong);
    const Tensor result = collective.on_ranks(counts, group);
    require(!result.requires_grad() && result.scalar_type() == torch::kLong, collective.name);
    require_close(result, truth.results[static_cast<size_t>(rank)].detach() * 4, 0,
                  collective.name + " of integers");
  });
}

// Runs several collectives, some of which depend on each other. Every rank must run their backwards
// in the reverse order of the forwards, even if the rank adds up its losses in another order or its
// inputs require no grad.
TEST_P(Differentiable, SeveralCollectivesKeepOneOrder) {
  expect_on_all([](const ProcessGroup& group) {
    const int n = group.world_size();
    const int rank = group.rank();
    const auto chain = [](const Tensor& x, const Tensor& total, const Tensor& rows) {
      return (total * x).sum() + (rows * rows).sum();
    };
    Tensors xs;
    for (int i = 0; i < n; ++i) xs.push_back(values(i, {n, 2}).requires_grad_(true));
    const Tensor sum = torch::stack(xs).sum(0);
    Tensor objective = torch::zeros({}, torch::kDouble);
    for (int i = 0; i < n; ++i) {
      const Tensor part = (torch::stack(xs) * sum).sum(0)[i];
      objective = objective + chain(xs[static_cast<size_t>(i)], sum, part.unsqueeze(0)) +
                  torch::cat(xs).pow(3).sum();
    }
    const Tensor expected = torch::autograd::grad({objective}, {xs[static_cast<size_t>(rank)]})[0];

    for (int frozen = -1; frozen < n; ++frozen) {
      const Tensor x = values(rank, {n, 2}).requires_grad_(rank != frozen);
      const Tensor total = functional::all_reduce(x, group);
      const Tensor gathered = functional::all_gather(x, group);
      const Tensor rows = functional::reduce_scatter(total * x, group);
      // The backward of this collective runs on every rank, although its input requires no grad.
      const Tensor constant = functional::all_reduce(torch::ones({2}, torch::kDouble), group);
      const Tensor first = chain(x, total, rows);
      const Tensor second = gathered.pow(3).sum() + 0 * constant.sum();
      const Tensor loss = rank % 2 == 0 ? first + second : second + first;
      loss.backward();
      if (rank == frozen) continue;
      require_close(x.grad(), expected, 1e-11, "chain");
    }
  });
}

// Ranks that hold the same extremum share its gradient equally, the gradient of a NaN is NaN, and
// an infinity can be an extremum.
TEST(Functional, TheGradientOfAnExtremumGoesToThoseThatHoldIt) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor inputs = torch::tensor(
      {{1.0, 5.0, 2.0, nan, -inf}, {1.0, 2.0, 2.0, 0.0, 3.0}, {0.0, 2.0, 2.0, 0.0, inf}},
      torch::kDouble);
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
      const Tensor all = inputs.clone().requires_grad_(true);
      ((op == ReduceOp::kMax ? all.amax(0) : all.amin(0)) * 6).sum().backward();
      const Tensor input = inputs[group.rank()].clone().requires_grad_(true);
      functional::all_reduce(input, group, {.op = op}).mul(2).sum().backward();
      require(torch::allclose(input.grad(), all.grad()[group.rank()], 0, 1e-15, true), "gradient");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
