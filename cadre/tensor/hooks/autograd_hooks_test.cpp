// Tests the behaviour of hooks and callbacks in libtorch's C++ autograd on which the wrappers rely
// (docs/decisions/0003).
#include "cadre/tensor/hooks/autograd_hooks.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "cadre/testing/torch/wrap_net.h"

namespace cadre::wrap {
namespace {

using namespace testing;  // NOLINT: the helpers of these tests

TEST(AccumulationHooks, FireOncePerParameterAndBackward) {
  Tensor a = torch::ones({2}, kDouble).requires_grad_(true);
  Tensor b = torch::ones({2}, kDouble).requires_grad_(true);
  Tensor unused = torch::ones({2}, kDouble).requires_grad_(true);
  std::vector<int> fired(3, 0);
  const std::vector<Tensor> leaves = {a, b, unused};
  const AccumulationHooks hooks(leaves, [&](size_t i) { ++fired[i]; });

  ((a * b).sum() + (a * a).sum()).backward();  // `a` is used three times
  EXPECT_EQ(fired, (std::vector<int>{1, 1, 0}));
  Tensor y = (a * b).sum();
  y.backward({}, /*retain_graph=*/true);
  y.backward();
  EXPECT_EQ(fired, (std::vector<int>{3, 3, 0}));
  const auto gradients = torch::autograd::grad({(a * b).sum()}, {a});
  EXPECT_EQ(fired, (std::vector<int>{3, 3, 0})) << "autograd::grad() accumulates nothing";
  torch::autograd::backward({(a * b).sum()}, {}, {}, false, /*inputs=*/{a});
  EXPECT_EQ(fired, (std::vector<int>{4, 3, 0}));
}

TEST(AccumulationHooks, IgnoreUndefinedGradients) {
  Tensor x = torch::ones({2}, kDouble).requires_grad_(true);
  Tensor ignored = torch::ones({2}, kDouble).requires_grad_(true);
  std::vector<int> fired(2, 0);
  const std::vector<Tensor> leaves = {x, ignored};
  const AccumulationHooks hooks(leaves, [&](size_t i) { ++fired[i]; });
  Probe::apply(x, ignored).sum().backward();
  EXPECT_EQ(fired, (std::vector<int>{1, 0}));
}

TEST(AccumulationHooks, AreRemovedByTheDestructor) {
  Tensor x = torch::ones({2}, kDouble).requires_grad_(true);
  int fired = 0;
  const Tensor y = x.sum();  // keeps the gradient accumulator alive when the hooks are gone
  {
    const std::vector<Tensor> leaves = {x};
    const AccumulationHooks hooks(leaves, [&](size_t) { ++fired; });
  }
  y.backward();
  EXPECT_EQ(fired, 0);
}

// A backward runs the node of the newest output first. Its hook must be able to tell which other
// outputs the backward will pass.
TEST(GraphNodes, ABackwardTellsAtItsStartWhichItPasses) {
  const Tensor x = torch::ones({2}, kDouble).requires_grad_(true);
  const Tensor w = torch::ones({2}, kDouble).requires_grad_(true);
  const Tensor older = x * w, other = x * 3, newer = w * 2;
  std::optional<GraphNode> node_of_older, node_of_other;
  std::vector<bool> passes;
  node_of_older = at_start_of_backward(older, [] {});
  node_of_other = at_start_of_backward(other, [] {});
  const auto look = [&] {
    passes = {current_backward_passes(*node_of_older), current_backward_passes(*node_of_other)};
  };
  at_start_of_backward(newer, look);
  ASSERT_TRUE(node_of_older && node_of_other);
  const auto run = [&](const Tensor& y, const std::vector<Tensor>& inputs) {
    passes.clear();
    torch::autograd::backward({y.sum()}, {}, /*retain_graph=*/true, /*create_graph=*/false, inputs);
    return passes;
  };
  EXPECT_EQ(run(newer, {}), (std::vector<bool>{false, false}));
  EXPECT_EQ(run(newer + older, {}), (std::vector<bool>{true, false}));
  EXPECT_EQ(run(newer + older + other, {}), (std::vector<bool>{true, true}));
  EXPECT_EQ(run(newer + older + other, {w}), (std::vector<bool>{true, false}));
  look();
  EXPECT_EQ(passes, (std::vector<bool>{false, false})) << "no backward runs";
  EXPECT_FALSE(at_start_of_backward(x, [] {})) << "a leaf";
}

TEST(GraphNodes, TheSingleRootOfABackwardIsNotInItsList) {
  const Tensor x = torch::ones({}, kDouble).requires_grad_(true);
  const Tensor y = x * 2;
  std::optional<GraphNode> node;
  bool has_run = false;
  node = at_start_of_backward(y, [&] {
    has_run = true;
    EXPECT_FALSE(current_backward_passes(*node));
  });
  y.backward();
  EXPECT_TRUE(has_run);
}

TEST(GraphNodes, ADerivativeIsARangeOfSequenceNumbers) {
  const Tensor x = torch::ones({2}, kDouble).requires_grad_(true);
  const Tensor w = torch::ones({2}, kDouble).requires_grad_(true);
  const Tensor y = x * w;
  uint64_t first = 0, end = 0;
  at_start_of_backward(y, [&] {
    if (!current_backward_creates_graph()) return;
    first = next_sequence();
    at_end_of_backward([&] { end = next_sequence(); }, [] {});
  });
  const Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true,
                                             /*create_graph=*/true)[0];
  ASSERT_LT(first, end);
  int num_in_range = -1;
  const std::vector<Tensor> leaves = {w};
  const AccumulationHooks hooks(leaves, [&](size_t) {
    const auto sequences = sequences_of_current_backward();
    num_in_range = static_cast<int>(std::ranges::count_if(
        sequences, [&](uint64_t sequence) { return sequence >= first && sequence < end; }));
  });
  y.sum().backward({}, /*retain_graph=*/true);
  EXPECT_EQ(num_in_range, 0);
  slope.pow(2).sum().backward();
  EXPECT_GT(num_in_range, 0);
}

TEST(EndOfBackward, RunsAfterAllHooksAndBeforeBackwardReturns) {
  std::vector<std::string> events;
  Tensor x = torch::ones({2}, kDouble).requires_grad_(true);
  const std::vector<Tensor> leaves = {x};
  const AccumulationHooks hooks(leaves, [&](size_t) { events.push_back("gradient"); });
  const Tensor y = x * 2;
  at_start_of_backward(y, [&] {
    events.push_back("start");
    at_end_of_backward([&] { events.push_back("end"); }, [&] { events.push_back("failure"); });
  });
  y.sum().backward();
  events.push_back("returned");
  EXPECT_EQ(events, (std::vector<std::string>{"start", "gradient", "end", "returned"}));
}

TEST(EndOfBackward, FailureIsToldBeforeTheExceptionArrives) {
  std::vector<std::string> events;
  Tensor x = torch::ones({2}, kDouble).requires_grad_(true);
  const Tensor y = Probe::apply(x, torch::ones({1}, kDouble)) * 2;
  at_start_of_backward(y, [&] {
    at_end_of_backward([&] { events.push_back("end"); }, [&] { events.push_back("failure"); });
  });
  Probe::fail = true;
  try {
    y.sum().backward();
  } catch (const std::runtime_error&) {
    events.push_back("caught");
  }
  Probe::fail = false;
  EXPECT_EQ(events, (std::vector<std::string>{"failure", "caught"}));
}

// The failing node is created after the other branches of the graph or before them. The engine runs
// the newest node first. So if the failing node runs first, other nodes are still in the engine's
// queue, which keeps the graph alive.
TEST(FailedBackward, ItsGraphIsKeptUntilItIsReleased) {
  for (const bool fails_first : {true, false}) {
    Tensor x = torch::ones({2}, kDouble).requires_grad_(true);
    Tensor saved = torch::ones({2}, kDouble);
    const c10::weak_intrusive_ptr<c10::TensorImpl> watch(saved.getIntrusivePtr());
    Probe::fail = true;
    const auto fail = [&] { return Probe::apply(x, torch::ones({1}, kDouble)); };
    Tensor sum = fails_first ? x * saved : fail();
    sum = sum + x.exp() * (fails_first ? fail() : x * saved);
    EXPECT_THROW(sum.sum().backward(), std::runtime_error);
    Probe::fail = false;
    sum = saved = Tensor();
    EXPECT_EQ(watch.expired(), !fails_first);
    release_failed_backward();
    EXPECT_TRUE(watch.expired());
    x.exp().sum().backward();
    EXPECT_DOUBLE_EQ(x.grad()[0].item<double>(), std::exp(1.0));
  }
}

}  // namespace
}  // namespace cadre::wrap
