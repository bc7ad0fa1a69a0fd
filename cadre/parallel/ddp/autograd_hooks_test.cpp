// What libtorch's C++ autograd does with hooks and callbacks, as decision 0003 states it.
#include "cadre/parallel/ddp/autograd_hooks.h"

#include <string>
#include <vector>

#include "cadre/parallel/ddp/ddp_test_support.h"

namespace cadre {
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
  const Tensor y = x.sum();  // keeps the accumulator alive beyond the hooks
  {
    const std::vector<Tensor> leaves = {x};
    const AccumulationHooks hooks(leaves, [&](size_t) { ++fired; });
  }
  y.backward();
  EXPECT_EQ(fired, 0);
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

}  // namespace
}  // namespace cadre
