// Tests modules that change after they were wrapped. If a gradient would no longer be reduced, the
// next forward must throw an error with the parameter's name. Freezing a parameter is allowed if
// all ranks do it.
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/ddp_peers.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::HasSubstr;

struct Changeable : Net {
  Changeable() {
    scale = register_parameter("scale", torch::ones({1, 2}, kDouble));
    late = register_parameter("late", torch::ones({2}, kDouble), /*requires_grad=*/false);
  }
  Tensor forward(const Tensor& x) { return Net::forward(x) * parameters_["scale"] + late; }

  void add() { register_parameter("extra", torch::ones({1}, kDouble)); }
  void add_child() { register_module("child", torch::nn::Linear(1, 1)); }
  void add_below() { second->register_module("child", torch::nn::Linear(1, 1)); }
  void replace() { parameters_["scale"] = torch::ones({1, 2}, kDouble).requires_grad_(true); }
  void remove() { unregister_module("side"); }
  void resize() { scale.set_data(torch::ones({2}, kDouble)); }
  void reorder() { first->weight.set_data(first->weight.data().t().contiguous().t()); }
  void move() { to(torch::kFloat); }
  void move_and_back() {
    to(torch::kFloat);
    to(kDouble);
  }
  void unfreeze() { late.set_requires_grad(true); }

  Tensor scale, late;
};

struct Change {
  const char* name;
  void (Changeable::*make)();
  const char* text;  // a part of the expected error
  bool still_runs;   // whether the module's forward still runs
};

constexpr Change kChanges[] = {
    {"added", &Changeable::add, "\"extra\" was added", true},
    {"added_with_a_child", &Changeable::add_child, "\"child.weight\" was added", true},
    {"added_below", &Changeable::add_below, "\"second.child.weight\" was added", true},
    {"replaced", &Changeable::replace, "\"scale\" was replaced by another tensor", true},
    {"removed", &Changeable::remove, "\"side.weight\" was removed", true},
    {"resized", &Changeable::resize,
     "\"scale\" was Double (1, 2), strides (2, 1), on cpu and is Double (2), strides (1), on cpu "
     "now",
     true},
    {"reordered", &Changeable::reorder,
     "\"first.weight\" was Double (4, 3), strides (3, 1), on cpu and is Double (4, 3), strides "
     "(1, 4), on cpu now",
     true},
    {"moved", &Changeable::move, " was Double ", false},
    {"moved_and_back", &Changeable::move_and_back,
     "\"scale\" was moved to another dtype or device and back", true},
    {"unfrozen", &Changeable::unfreeze, "\"late\" was frozen and requires grad now", true},
};

class DdpChanges : public ::testing::TestWithParam<Change> {};

TEST_P(DdpChanges, AreNamedAtTheNextForwardAndWrappingAgainIsRight) {
  const auto net = std::make_shared<Changeable>();
  const auto formula = std::make_shared<DdpPeers>(kWorld);
  const FakeGroup peers(formula);
  {
    DistributedDataParallel model{net, peers.group()};
    loss_of(model(input())).backward();
    ((*net).*GetParam().make)();
    const std::string error = error_of([&] { model(input()); }, ErrorCode::kInvalidArgument);
    EXPECT_THAT(error, HasSubstr(GetParam().text));
    EXPECT_THAT(error, HasSubstr("Wrap the module again"));
    if (!GetParam().still_runs) return;
    const torch::NoGradGuard no_grad;
    model(input());  // a forward without grad must not throw, because it reduces nothing
  }
  net->zero_grad();
  DistributedDataParallel again{net, peers.group()};
  loss_of(again(input())).backward();
  std::vector<Tensor> reduced;
  for (const Tensor& parameter : net->parameters()) {
    reduced.push_back(parameter.grad().defined() ? parameter.grad().clone() : Tensor());
  }
  net->zero_grad();
  {
    const auto guard = again.no_sync();
    loss_of(net->forward(input())).backward();
  }
  expect_gradients(*net, reduced, 1 / formula->mean_factor());
}

INSTANTIATE_TEST_SUITE_P(Cases, DdpChanges, ::testing::ValuesIn(kChanges),
                         [](const auto& test) { return test.param.name; });

TEST(DdpChanges, AWorldOfOneTakesEveryChange) {
  for (const Change& change : kChanges) {
    const auto net = std::make_shared<Changeable>();
    DistributedDataParallel model{net, FakeGroup(std::make_shared<PeersFormula>(1)).group()};
    ((*net).*change.make)();
    if (change.still_runs) {
      EXPECT_NO_THROW(loss_of(model(input())).backward()) << change.name;
    }
  }
}

// A model with parameters a and b on one of three ranks. The gradients are rank + 1, so their mean
// is 2.
class Freezing {
 public:
  explicit Freezing(const ProcessGroup& group)
      : rank_(group.rank()),
        module_(std::make_shared<Linear>()),
        model_{module_, group, {.bucket_caps = {.first_bytes = 8, .bytes = 8}}} {}

  void freeze(bool frozen) { module_->b.set_requires_grad(!frozen); }
  void step() { model_(torch::full({4}, rank_ + 1.0, kDouble)).backward(); }
  void zero_grad() { module_->zero_grad(); }
  const Tensor& gradient_of_a() const { return module_->a.grad(); }
  const Tensor& gradient_of_b() const { return module_->b.grad(); }

 private:
  struct Linear : torch::nn::Module {
    Linear() {
      a = register_parameter("a", torch::ones({4}, kDouble));
      b = register_parameter("b", torch::ones({4}, kDouble));
    }
    Tensor forward(const Tensor& x) { return (x * a + x * b).sum(); }
    Tensor a, b;
  };

  int rank_;
  std::shared_ptr<Linear> module_;
  DistributedDataParallel<Linear> model_;
};

void require_mean(const Tensor& gradient, double expected, const char* what) {
  require(gradient.defined() &&
              torch::allclose(gradient, torch::full({4}, expected, kDouble), 1e-14, 0),
          what);
}

TEST(DdpFreezing, OnOneRankOnlyIsNamedOnAllRanks) {
  const auto result = run_groups(3, [](const ProcessGroup& group, std::string&) {
    Freezing ranks(group);
    for (const bool has_gradients : {false, true, false}) {
      ranks.zero_grad();
      if (has_gradients) ranks.step();
      if (group.rank() == 1) ranks.freeze(true);
      const std::string failure = failure_of([&] { ranks.step(); });
      require(
          failure.find("\"b\" is frozen on rank 1 but trained on ranks 0, 2") != std::string::npos,
          failure);
      ranks.freeze(false);
      ranks.zero_grad();
      ranks.step();
      require_mean(ranks.gradient_of_a(), 2, "a after the error");
      require_mean(ranks.gradient_of_b(), 2, "b after the error");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DdpFreezing, OnAllRanksLeavesTheGradientAndIsNotCalledUnused) {
  const auto log = std::make_shared<LogLines>();
  const auto result =
      run_groups(3,
                 [](const ProcessGroup& group, std::string&) {
                   Freezing ranks(group);
                   ranks.freeze(true);
                   ranks.step();
                   require(!ranks.gradient_of_b().defined(), "none before, none after");
                   ranks.freeze(false);
                   ranks.zero_grad();
                   ranks.step();
                   ranks.freeze(true);
                   const Tensor before = ranks.gradient_of_b().clone();
                   ranks.step();
                   require_mean(ranks.gradient_of_a(), 4, "a goes on");
                   require(torch::equal(ranks.gradient_of_b(), before), "b keeps its bits");
                 },
                 {.log = log});
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_THAT(log->get(), ::testing::Not(::testing::Contains(HasSubstr("unused"))));
}

}  // namespace
}  // namespace cadre
