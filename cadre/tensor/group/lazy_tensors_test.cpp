// Tests that the differentiable collectives accept lazy tensors and gradients, whose values differ
// from the contents of their memory, and that the collectives of the group refuse them. Ranks are
// threads.
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/_neg_view.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cadre/tensor/group/backward/differentiable.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;

struct Function {
  std::string name;
  std::function<Tensor(const Tensor&, const ProcessGroup&)> call;
};

std::vector<Function> functions() {
  using namespace functional;
  const auto reduced = [](ReduceOp op) {
    return [op](const Tensor& x, const ProcessGroup& g) { return all_reduce(x, g, {.op = op}); };
  };
  return {
      {"sum", reduced(ReduceOp::kSum)},
      {"max", reduced(ReduceOp::kMax)},
      {"all_gather", [](const Tensor& x, const ProcessGroup& g) { return all_gather(x, g); }},
      {"reduce_scatter",
       [](const Tensor& x, const ProcessGroup& g) { return reduce_scatter(x, g); }},
      {"all_to_all", [](const Tensor& x, const ProcessGroup& g) { return all_to_all(x, g); }},
      {"broadcast",
       [](const Tensor& x, const ProcessGroup& g) { return functional::broadcast(x, g); }},
      {"copy_to_group", [](const Tensor& x, const ProcessGroup& g) { return copy_to_group(x, g); }},
      {"reduce_from_group",
       [](const Tensor& x, const ProcessGroup& g) { return reduce_from_group(x, g); }},
      {"scatter_to_group",
       [](const Tensor& x, const ProcessGroup& g) { return scatter_to_group(x, g); }},
      {"gather_from_group",
       [](const Tensor& x, const ProcessGroup& g) { return gather_from_group(x, g, {.dim = 0}); }}};
}

// A kind of lazy tensor: a function that makes one, and a function that makes a plain tensor with
// the same values.
struct Form {
  std::string name;
  std::function<Tensor(const Tensor&)> lazy;
  std::function<Tensor(const Tensor&)> plain;
};

std::vector<Form> forms() {
  return {{"negated", [](const Tensor& x) { return at::_neg_view(x); },
           [](const Tensor& x) { return x.neg(); }},
          {"zero", [](const Tensor& x) { return at::_efficientzerotensor(x.sizes(), x.options()); },
           [](const Tensor& x) { return torch::zeros_like(x); }}};
}

Tensor numbers(int rank) {
  return torch::arange(1.0, 9.0, torch::kDouble).view({4, 2}) * (rank + 1);
}

TEST(LazyTensors, MayBeInputsOfTheDifferentiableCollectives) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    for (const Function& function : functions()) {
      for (const Form& form : forms()) {
        const Tensor lazy = function.call(form.lazy(numbers(group.rank())), group);
        const Tensor plain = function.call(form.plain(numbers(group.rank())), group);
        require(torch::equal(lazy.detach(), plain.detach()), function.name + " of " + form.name);
        require(!lazy.is_neg() && !lazy._is_zerotensor(), function.name + " of " + form.name);
      }
      // The input of forward is lazy in this case, too.
      const Tensor input = numbers(group.rank()).requires_grad_(true);
      function.call(at::_neg_view(input), group).sum().backward();
      const Tensor truth = numbers(group.rank()).requires_grad_(true);
      function.call(truth.neg(), group).sum().backward();
      require(torch::equal(input.grad().resolve_neg(), truth.grad()), function.name);
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(LazyTensors, MayBeGradientsOfTheDifferentiableCollectives) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    for (const Function& function : functions()) {
      for (const Form& form : forms()) {
        const auto gradient_in = [&](const std::function<Tensor(const Tensor&)>& change) {
          const Tensor input = numbers(group.rank()).requires_grad_(true);
          const Tensor output = function.call(input, group);
          output.register_hook([&](const Tensor& gradient) { return change(gradient); });
          (output * (group.rank() + 2)).sum().backward();
          require(failure_of([&] { input.mutable_grad().detach_(); }).empty(), function.name);
          return input.grad().clone();
        };
        require(torch::equal(gradient_in(form.lazy), gradient_in(form.plain)),
                function.name + " of " + form.name);
      }
    }
    // The gathered real tensor is used by complex operators, whose derivatives are negated views.
    // So all_gather's backward gets a lazy gradient.
    const Tensor input = torch::ones({4}, torch::kDouble).requires_grad_(true);
    const Tensor all = functional::all_gather(input, group);
    const Tensor ones = torch::ones_like(all);
    at::real((torch::complex(ones, all).conj() * torch::complex(ones, ones)).sum()).backward();
    require(torch::equal(input.grad(), torch::full_like(input, 2)), "of two losses");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(LazyTensors, AreRefusedByTheCollectivesOfTheGroup) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const Tensor zero = at::_efficientzerotensor({4}, torch::TensorOptions(torch::kFloat));
    const auto refused = [](const std::function<void()>& call, const std::string& sentence) {
      const std::string failure = failure_of(call);
      require(failure.find("kInvalidArgument") == 0, failure);
      require(failure.find(sentence) != std::string::npos, failure);
    };
    refused([&] { group.all_reduce(zero); },
            "the tensor (4) is a zero tensor without memory; keep copy");
    refused([&] { group.all_gather(torch::empty({8}), zero); },
            "the input (4) is a zero tensor without memory; pass input.clone()");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The gradient is infinite, as the sum of two large gradients in float16 may be. The rank that does
// not hold the extremum must get 0, not infinity * 0 = NaN.
TEST(LazyTensors, AnInfiniteGradientOfAnExtremumIsZeroElsewhere) {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
      const Tensor input = torch::tensor({1.0 + group.rank(), 5.0}).requires_grad_(true);
      const Tensor gradient = torch::tensor({infinity, infinity}).to(input.scalar_type());
      functional::all_reduce(input, group, {.op = op}).backward(gradient);
      const bool holds = (op == ReduceOp::kMax) == (group.rank() == 1);
      require(input.grad()[0].item<double>() == (holds ? infinity : 0), "the extremum");
      require(input.grad()[1].item<double>() == infinity, "both hold it");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
