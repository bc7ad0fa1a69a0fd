// Tests redistribute() in autograd: the result is no view, and the backward accepts gradients in
// every form in which libtorch passes them (expanded, negated, zero without memory). The ranks are
// threads.
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/_neg_view.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/tensor/mesh/device_mesh.h"
#include "cadre/tensor/mesh/dtensor.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using testing::failure_of;
using testing::require;
using testing::run_groups;
using torch::Tensor;
using Placements = std::vector<Placement>;

void expect_ok(const testing::RanksResult& result) {
  EXPECT_TRUE(result.ok()) << result.failures();
}

struct Case {
  Placement from;
  Placement to;
  std::vector<int64_t> sizes;

  std::string name() const {
    return format("{} {} -> {}", list_of(sizes), to_string(from), to_string(to));
  }
};

// Returns cases with even and uneven chunks of both dimensions: reduce_scatter, padded and exact
// gathers, slices and exchanges.
std::vector<Case> cases() {
  const std::vector<Placement> placements = {Shard(0), Shard(1), Replicate(), Partial()};
  std::vector<Case> all;
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{4, 6}, {3, 5}, {1, 2}, {17, 3}, {40, 41}}) {
    for (const Placement& from : placements) {
      for (const Placement& to : placements) {
        if (&from != &to) all.push_back({from, to, sizes});
      }
    }
  }
  return all;
}

Tensor ones_of(const DeviceMesh& mesh, const Case& c) {
  return torch::ones(
      local_box(c.sizes, mesh.shape(), mesh.coordinates(), Placements{c.from}).sizes);
}

// Autograd throws at in-place changes of some views. If the result were a view on some ranks only,
// these ranks would throw while the others wait in a collective.
TEST(DTensorAutograd, AResultIsNoViewAndMayBeChangedInPlace) {
  expect_ok(run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}});
    for (const Case& c : cases()) {
      const Tensor local = ones_of(mesh, c).requires_grad_(true);
      const DTensor moved =
          DTensor::from_local(local, mesh, {c.from}, c.sizes).redistribute({c.to});
      require(!moved.local().is_view(), c.name());
      moved.local().mul_(2);
      moved.full_tensor().sum().backward();
      require(torch::equal(local.grad(), torch::full_like(local, 2)), c.name() + ": gradient");
      // zero_grad(/*set_to_none=*/false) calls these functions on a gradient.
      require(failure_of([&] { local.mutable_grad().detach_().zero_(); }).empty(), c.name());

      const torch::NoGradGuard no_grad;
      const DTensor plain =
          DTensor::from_local(local.detach(), mesh, {c.from}, c.sizes).redistribute({c.to});
      require(!plain.local().is_view(), c.name() + " without gradients");
      require(failure_of([&] { plain.full_tensor().detach_(); }).empty(), c.name());
      require(plain.local().storage().nbytes() == plain.local().nbytes(), c.name());
    }
  }));
}

// Runs a redistribution and its backward. `change` converts the incoming gradient to another form,
// such as a negated view.
void check_gradient_in_form(const std::function<Tensor(const Tensor&)>& change, double expected) {
  expect_ok(run_groups(2, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}});
    for (const Case& c : cases()) {
      const Tensor local = ones_of(mesh, c).requires_grad_(true);
      const Tensor moved =
          DTensor::from_local(local, mesh, {c.from}, c.sizes).redistribute({c.to}).local();
      moved.register_hook([&](const Tensor& gradient) { return change(gradient); });
      moved.sum().backward();
      require(torch::equal(local.grad().resolve_neg(), torch::full_like(local, expected)),
              c.name());
    }
  }));
}

// The derivatives of complex operators pass on gradients that are negated only when they are read.
TEST(DTensorAutograd, AGradientMayBeALazilyNegatedView) {
  check_gradient_in_form([](const Tensor& gradient) { return at::_neg_view(gradient); }, -1);
  expect_ok(run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}});
    const Tensor local = torch::ones({4}, torch::kDouble).requires_grad_(true);
    const Tensor full = DTensor::from_local(local, mesh, {Shard(0)}, {8}).full_tensor();
    const Tensor ones = torch::ones_like(full);
    at::real((torch::complex(ones, full).conj() * torch::complex(ones, ones)).sum()).backward();
    require(torch::equal(local.grad(), torch::ones_like(local)), "of (1 - iy)(1 + i): y");
  }));
}

TEST(DTensorAutograd, AGradientMayBeALazyZero) {
  check_gradient_in_form(
      [](const Tensor& gradient) {
        return at::_efficientzerotensor(gradient.sizes(), gradient.options());
      },
      0);
}

// The local tensor is lazy on one rank only. The ranks must still run the same collectives.
TEST(DTensorAutograd, ALocalTensorMayBeLazy) {
  expect_ok(run_groups(2, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}});
    for (const Case& c : cases()) {
      Tensor negated = ones_of(mesh, c);
      Tensor zero = torch::zeros_like(negated);
      if (world.rank() == 0 || c.from.is_replicate()) {
        negated = at::_neg_view(torch::full_like(negated, -1));
        zero = at::_efficientzerotensor(negated.sizes(), negated.options());
      }
      const auto full_of = [&](const Tensor& local) {
        return DTensor::from_local(local, mesh, {c.from}, c.sizes)
            .redistribute({c.to})
            .full_tensor();
      };
      const double value = c.from.partial() != nullptr ? 2 : 1;
      require(torch::equal(full_of(negated), torch::full(c.sizes, value)), c.name() + ": negated");
      require(torch::equal(full_of(zero), torch::zeros(c.sizes)), c.name() + ": zero");
    }
    const Tensor lazy = at::_efficientzerotensor({4}, torch::TensorOptions());
    for (const Placement& to : Placements{Shard(0), Replicate(), Partial()}) {
      const DTensor tensor = DTensor::distribute(lazy, mesh, {to});
      require(torch::equal(tensor.full_tensor(), torch::zeros({4})), "distribute");
    }
  }));
}

// A mean along an axis whose placement does not change must not scale the gradient: float16 would
// overflow in between, and multiplying and then dividing by 3 is not exact.
TEST(DTensorAutograd, AMeanThatStaysDoesNotScaleTheGradient) {
  expect_ok(run_groups(6, [](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"a", 3}, {"b", 2}});
    const auto check = [&](const Tensor& local, const Placements& from, const Placements& to,
                           const Tensor& gradient, const Tensor& expected) {
      local.requires_grad_(true);
      DTensor::from_local(local, mesh, from, {100, 2}).redistribute(to).local().backward(gradient);
      require(torch::equal(local.grad(), expected), to_string(std::span(from)));
    };
    const Placement mean = Partial(ReduceOp::kAvg);
    const Tensor large = torch::full({100, 2}, 40000.0, torch::kHalf);
    const Tensor own = large.narrow(0, 0, 50);
    check(torch::ones({50, 2}, torch::kHalf), {mean, Shard(0)}, {mean, Replicate()}, large, own);
    // Partial(avg) moves from axis a, with 3 operands, to axis b, with 2 operands.
    check(torch::ones({100, 2}, torch::kHalf), {mean, Replicate()}, {Replicate(), mean}, large,
          (large.to(torch::kDouble) * 2 / 3).to(torch::kHalf));
    torch::manual_seed(1);
    const Tensor odd = torch::randn({100, 2});
    check(torch::ones({50, 2}), {mean, Shard(0)}, {mean, Replicate()}, odd,
          odd.narrow(0, 50 * mesh.coordinate("b"), 50));
  }));
}

// A redistribution does not support the tangent of forward-mode differentiation. It must throw and
// not drop the tangent silently.
TEST(DTensorAutograd, ForwardModeIsRefused) {
  const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
  const testing::RanksResult result = run_groups(2, [&](const ProcessGroup& world) {
    const DeviceMesh mesh(world, {{"x", 2}});
    const auto refused = [](const std::function<void()>& call) {
      const std::string failure = failure_of(call);
      require(failure.find("kInvalidArgument: DTensor::") == 0, failure);
      require(
          failure.find("carries a tangent of forward-mode differentiation") != std::string::npos,
          failure);
    };
    const Tensor dual =
        at::_make_dual(torch::ones({4}), torch::ones({4}), static_cast<int64_t>(level));
    refused([&] { (void)DTensor::from_local(dual, mesh, {Partial()}, {4}); });
    refused([&] { (void)DTensor::distribute(dual, mesh, {Shard(0)}); });
    const Tensor changed = torch::ones({4});
    const DTensor tensor = DTensor::from_local(changed, mesh, {Partial()}, {4});
    changed.mul_(dual);
    refused([&] { (void)tensor.full_tensor(); });
  });
  torch::autograd::ForwardADLevel::release_idx(level);
  expect_ok(result);
}

}  // namespace
}  // namespace cadre
