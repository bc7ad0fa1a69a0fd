// Tests the properties of the reduction of gradients during a backward that decision 0003 claims,
// on small models. The other ranks are simulated by a formula (PeersFormula).
#include <torch/optim/sgd.h>
#include <functional>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/testing/torch/ddp_peers.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::HasSubstr;

using DdpMechanics = DdpTest;

TEST_F(DdpMechanics, GradientsAreTheMeanWhenBackwardReturns) {
  auto model = wrap();
  peers_.clear_log();
  loss_of(model(input())).backward();
  expect_gradients(*net_, local_gradients(*net_, plain_step), formula_->mean_factor());
  EXPECT_GT(peers_.log().size(), 2U);
}

TEST_F(DdpMechanics, GradientsLieInBucketsHoweverTheyAreZeroed) {
  auto model = wrap();
  const auto expected = local_gradients(*net_, plain_step);
  loss_of(model(input())).backward();  // this backward determines the layout
  loss_of(model(input()).mul(0)).backward();
  std::vector<void*> homes;
  for (const Tensor& p : net_->parameters()) homes.push_back(p.grad().data_ptr());
  torch::optim::SGD optimizer(net_->parameters(), 0.1);
  for (const bool set_to_none : {true, false, true, false}) {
    net_->zero_grad(set_to_none);
    // This calls detach_(), which would throw if the gradient were a view for autograd.
    optimizer.zero_grad(set_to_none);
    loss_of(model(input())).backward();
    for (size_t i = 0; i < homes.size(); ++i) {
      EXPECT_EQ(net_->parameters()[i].grad().data_ptr(), homes[i]) << "set_to_none " << set_to_none;
    }
    expect_gradients(*net_, expected, formula_->mean_factor());
  }
}

TEST_F(DdpMechanics, BackwardAddsToReducedGradients) {
  auto model = wrap();
  loss_of(model(input())).backward();
  loss_of(model(input())).backward();
  // The second backward averages the sum of the earlier mean, f * g, and this rank's new gradient
  // g. The simulated ranks multiply the sum by f, too.
  const double f = formula_->mean_factor();
  expect_gradients(*net_, local_gradients(*net_, plain_step), f * (f + 1));
}

TEST_F(DdpMechanics, UnusedByAllStaysUntouched) {
  net_->use_side = false;
  auto model = wrap();
  for (int step = 0; step < 2; ++step) {
    net_->zero_grad();
    loss_of(model(input())).backward();
    EXPECT_FALSE(net_->side->weight.grad().defined());
    expect_gradients(*net_, local_gradients(*net_, plain_step), formula_->mean_factor());
  }
  // A gradient from before that no rank uses must keep its bits, although the bucket in which it
  // lies is reduced.
  net_->side->weight.mutable_grad() = torch::full_like(net_->side->weight, 0.1);
  net_->first->zero_grad();
  net_->second->zero_grad();
  loss_of(model(input())).backward();
  EXPECT_TRUE(torch::equal(net_->side->weight.grad(), torch::full_like(net_->side->weight, 0.1)));
}

TEST_F(DdpMechanics, UsedByAnotherRankOnlyGetsItsGradient) {
  net_->use_side = false;
  auto model = wrap();
  formula_->counts = torch::zeros({6 + 6 + 9 * kWorld}, torch::kInt);
  formula_->counts.narrow(0, 0, 6).fill_(3);  // 3: all other ranks use these 6 parameters
  loss_of(model(input())).backward();
  ASSERT_TRUE(net_->side->weight.grad().defined());
  EXPECT_TRUE(torch::equal(net_->side->weight.grad(), torch::zeros_like(net_->side->weight)));
}

TEST_F(DdpMechanics, APeersFlagAloneStartsTheCounts) {
  auto model = wrap();
  formula_->flag = 1;
  formula_->counts = torch::zeros({6 + 6 + 9 * kWorld}, torch::kInt);
  formula_->counts[6 + 6 + 2] = 1;
  const std::string error =
      error_of([&] { loss_of(model(input())).backward(); }, ErrorCode::kAborted);
  EXPECT_THAT(error, HasSubstr("rank 2 left this backward by an exception"));
}

// Two forwards precede two backwards on all ranks. The ranks compare this in the trailer, which is
// reduced together with the last bucket. So a backward must make no other call than one reduction
// for each bucket.
TEST_F(DdpMechanics, EqualPositionsOfTheRanksCostNoMessage) {
  options_.weighting = GradientWeighting::kEqual;
  auto model = wrap();
  loss_of(model(input())).backward();  // this backward determines the layout
  model(input());                      // this forward has no backward
  const Tensor a = loss_of(model(input()));
  const Tensor b = loss_of(model(input()));
  peers_.clear_log();
  a.backward();
  b.backward();
  const auto num_buckets = static_cast<ptrdiff_t>(model.learned_layout()->buckets.size());
  EXPECT_EQ(std::ssize(peers_.log()), 2 * num_buckets);
}

struct HeadImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  void tie(const Tensor& other) { weight = parameters_["weight"] = other; }
};
TORCH_MODULE(Head);

// A model with a tied weight, which the embedding and the head have registered, and a frozen
// parameter.
struct Tied : torch::nn::Module {
  Tied() {
    torch::manual_seed(3);
    embedding = register_module("embedding", torch::nn::Embedding(6, 3));
    head = register_module("head", Head(torch::nn::LinearOptions(3, 6).bias(false)));
    frozen = register_module("frozen", torch::nn::Linear(3, 3));
    to(kDouble);
    head->tie(embedding->weight);
    for (Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }
  Tensor forward(const Tensor& tokens) { return head(frozen(embedding(tokens))); }

  torch::nn::Embedding embedding{nullptr};
  Head head{nullptr};
  torch::nn::Linear frozen{nullptr};
};

TEST_F(DdpMechanics, TiedAndFrozenParameters) {
  const Tensor tokens = torch::tensor({0, 2, 5}, torch::kLong);
  auto reference = std::make_shared<Tied>();
  loss_of(reference->forward(tokens)).backward();

  auto net = std::make_shared<Tied>();
  auto model = DistributedDataParallel(net, peers_.group(), options_);
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    loss_of(model(tokens)).backward();
    EXPECT_TRUE(torch::allclose(net->embedding->weight.grad(),
                                reference->embedding->weight.grad() * formula_->mean_factor()));
    EXPECT_FALSE(net->frozen->weight.grad().defined());
  }
  ASSERT_TRUE(model.learned_layout());
  EXPECT_EQ(model.learned_layout()->to_string(), "float64:0") << "the tied tensor counts once";
  net->frozen->weight.set_requires_grad(true);
  EXPECT_THAT(error_of([&] { model(tokens); }, ErrorCode::kInvalidArgument),
              HasSubstr("\"frozen.weight\" was frozen"));
}

TEST_F(DdpMechanics, NoSyncAccumulatesAndTheNextBackwardReducesTheSum) {
  auto model = wrap();
  const auto local = local_gradients(*net_, plain_step);
  peers_.clear_log();
  {
    const auto guard = model.no_sync();
    loss_of(model(input())).backward();
    loss_of(model(input())).backward();
    expect_gradients(*net_, local, 2);
    EXPECT_TRUE(peers_.log().empty());
  }
  loss_of(model(input())).backward();
  expect_gradients(*net_, local, 3 * formula_->mean_factor());
}

TEST_F(DdpMechanics, ParametersUsedOnlyUnderNoSyncAreReduced) {
  auto model = wrap();
  const auto with_side = local_gradients(*net_, plain_step);
  {
    const auto guard = model.no_sync();
    loss_of(model(input())).backward();
  }
  net_->use_side = false;
  loss_of(model(input())).backward();
  EXPECT_TRUE(torch::allclose(net_->side->weight.grad(), with_side[4] * formula_->mean_factor()));
}

TEST_F(DdpMechanics, ReduceGradientsEndsAnAccumulationWithoutABackward) {
  auto model = wrap();
  {
    const auto guard = model.no_sync();
    loss_of(model(input())).backward();
  }
  model.reduce_gradients();
  expect_gradients(*net_, local_gradients(*net_, plain_step), formula_->mean_factor());
}

TEST_F(DdpMechanics, SecondBackwardThroughOneForwardIsRefused) {
  auto model = wrap();
  const Tensor output = model(input());
  loss_of(output).backward({}, /*retain_graph=*/true);
  EXPECT_THAT(error_of([&] { loss_of(output).backward(); }, ErrorCode::kInvalidArgument),
              HasSubstr("second backward() through one forward"));
  // The error recommends no_sync() for all backwards but the last one. This must give the right
  // gradients.
  net_->zero_grad();
  const Tensor again = model(input());
  {
    const auto guard = model.no_sync();
    loss_of(again).backward({}, /*retain_graph=*/true);
  }
  loss_of(again).backward();
  expect_gradients(*net_, local_gradients(*net_, plain_step), 2 * formula_->mean_factor());
}

TEST_F(DdpMechanics, TwoForwardsThenOneOrTwoBackwards) {
  auto model = wrap();
  const auto local = local_gradients(*net_, plain_step);
  const Tensor a = model(input());
  const Tensor b = model(input());
  (loss_of(a) + loss_of(b)).backward();
  expect_gradients(*net_, local, 2 * formula_->mean_factor());
  net_->zero_grad();
  const Tensor c = model(input());
  const Tensor d = model(input());
  loss_of(c).backward();
  net_->zero_grad();
  loss_of(d).backward();
  expect_gradients(*net_, local, formula_->mean_factor());
}

TEST_F(DdpMechanics, ModuleCalledDirectlyIsRefused) {
  auto model = wrap();
  const auto direct = [&] { loss_of(model.module()->forward(input())).backward(); };
  EXPECT_THAT(error_of(direct, ErrorCode::kInvalidArgument),
              HasSubstr("came without a forward through the wrapper"));
}

TEST_F(DdpMechanics, CreateGraphIsRefusedAndTheNextStepIsRight) {
  auto model = wrap();
  const auto second_order = [&] {
    loss_of(model(input())).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  };
  EXPECT_THAT(error_of(second_order, ErrorCode::kInvalidArgument), HasSubstr("create_graph=true"));
  for (const Tensor& p : net_->parameters()) EXPECT_FALSE(p.grad().defined()) << "nothing touched";
  loss_of(model(input())).backward();
  expect_gradients(*net_, local_gradients(*net_, plain_step), formula_->mean_factor());
}

TEST_F(DdpMechanics, GradientPenaltyByAutogradGradIsRight) {
  const auto penalty_step = [](auto&& forward) {
    const Tensor x = input().requires_grad_(true);
    const Tensor y = forward(x);
    const auto slope = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true,
                                             /*create_graph=*/true)[0];
    (slope.pow(2).sum() + loss_of(y)).backward();
  };
  auto model = wrap();
  penalty_step([&](const Tensor& x) { return model(x); });
  const auto local = local_gradients(
      *net_, [&](Net& net) { penalty_step([&](const Tensor& x) { return net.forward(x); }); });
  expect_gradients(*net_, local, formula_->mean_factor());
}

// autograd::grad() differentiates the loss by the parameters, so this derivative uses the same
// gradient accumulators as the backward that is reduced.
TEST_F(DdpMechanics, PenaltyOnTheGradientsThemselvesIsRight) {
  const auto penalty_step = [](Net& net, auto&& forward) {
    const Tensor loss = loss_of(forward(input()));
    Tensor penalty = torch::zeros({}, kDouble);
    for (const Tensor& gradient : torch::autograd::grad({loss}, net.parameters(), {},
                                                        /*retain_graph=*/true,
                                                        /*create_graph=*/true)) {
      penalty = penalty + gradient.pow(2).sum();
    }
    (loss + penalty).backward();
  };
  auto model = wrap();
  const auto local = local_gradients(
      *net_, [&](Net& net) { penalty_step(net, [&](const Tensor& x) { return net.forward(x); }); });
  for (int step = 0; step < 2; ++step) {
    net_->zero_grad();
    penalty_step(*net_, [&](const Tensor& x) { return model(x); });
    expect_gradients(*net_, local, formula_->mean_factor());
  }
}

// Activation checkpointing of `body`: its backward recomputes `body` and runs a nested backward
// through it, inside of the outer backward.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static inline std::function<Tensor(const Tensor&)> body;
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x});
    const torch::NoGradGuard no_grad;
    return body(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const torch::AutoGradMode with_grad(true);
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    torch::autograd::backward({body(x)}, {grads[0]});
    return {x.grad()};
  }
};

struct Checkpointed : Net {
  Tensor forward(const Tensor& x) {
    Tensor hidden = first(x);
    for (int i = 0; i < num_passes; ++i) hidden = Checkpoint::apply(hidden);
    return second(hidden);
  }
  int num_passes = 1;
};

TEST_F(DdpMechanics, NestedBackwardBelongsToTheOuterPass) {
  auto net = std::make_shared<Checkpointed>();
  Checkpoint::body = [&net](const Tensor& x) { return torch::tanh(x * net->side->bias.sum()); };
  auto reference = std::make_shared<Checkpointed>();
  loss_of(reference->second(torch::tanh(reference->first(input()) * reference->side->bias.sum())))
      .backward();
  auto model = DistributedDataParallel(net, peers_.group(), options_);
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    loss_of(model(input())).backward();
    for (const char* name : {"first.weight", "first.bias", "side.bias", "second.weight"}) {
      EXPECT_TRUE(
          torch::allclose(net->named_parameters()[name].grad(),
                          reference->named_parameters()[name].grad() * formula_->mean_factor()))
          << name;
    }
  }
  Checkpoint::body = nullptr;
}

struct InnerAndOuter : torch::nn::Module {
  InnerAndOuter() {
    inner = register_module("inner", torch::nn::Linear(3, 3));
    outer = register_module("outer", torch::nn::Linear(3, 3));
  }
  Tensor forward(const Tensor& x) { return is_inner ? inner(x) : outer(x); }
  torch::nn::Linear inner{nullptr}, outer{nullptr};
  bool is_inner = false;
};

// A nested backward goes through an output of a forward of the same wrapper, after the outer
// backward has begun the reduction. The inner gradients must be reduced with it, and another
// backward of the inner forward must throw.
TEST_F(DdpMechanics, AForwardOfANestedBackwardIsReducedWithThePassOnce) {
  const auto net = std::make_shared<InnerAndOuter>();
  DistributedDataParallel model(net, peers_.group(), options_);
  Tensor kept;
  Checkpoint::body = [&](const Tensor& x) {
    net->is_inner = true;
    const Tensor y = model(x);
    net->is_inner = false;
    if (y.requires_grad()) kept = y;
    return torch::tanh(y);
  };
  const Tensor x = torch::ones({5, 3}).requires_grad_(true);
  model(Checkpoint::apply(x)).sum().backward();
  Checkpoint::body = nullptr;
  EXPECT_TRUE(net->inner->weight.grad().defined());
  EXPECT_THAT(error_of([&] { kept.sum().backward(); }, ErrorCode::kInvalidArgument),
              HasSubstr("a second backward() through one forward"));
}

TEST_F(DdpMechanics, AGradientThatComesTwiceIsRefusedAndTheRemedyIsRight) {
  auto net = std::make_shared<Checkpointed>();
  net->num_passes = 2;
  Checkpoint::body = [&net](const Tensor& x) { return torch::tanh(x * net->side->bias.sum()); };
  auto model = DistributedDataParallel(net, peers_.group(), options_);
  EXPECT_THAT(error_of([&] { loss_of(model(input())).backward(); }, ErrorCode::kInvalidArgument),
              HasSubstr("\"side.bias\" came twice"));
  net->zero_grad();
  std::vector<Tensor> local;
  {
    const auto guard = model.no_sync();
    loss_of(model(input())).backward();
    for (const Tensor& p : net->parameters())
      local.push_back(p.grad().defined() ? p.grad().clone() : Tensor());
  }
  model.reduce_gradients();
  expect_gradients(*net, local, formula_->mean_factor());
  Checkpoint::body = nullptr;
}

struct ModeChanging : Net {
  Tensor forward(const Tensor& x) {
    const Tensor output = Net::forward(x);
    if (mode) torch::GradMode::set_enabled(*mode);
    return output;
  }
  std::optional<bool> mode;
};

TEST_F(DdpMechanics, AForwardMayChangeTheGradMode) {
  auto net = std::make_shared<ModeChanging>();
  auto model = DistributedDataParallel(net, peers_.group(), options_);
  net->mode = true;
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(model(input()).requires_grad());
  }
  net->mode = false;
  Tensor output;
  {
    const torch::AutoGradMode guard(true);
    output = model(input());
  }
  loss_of(output).backward();
  expect_gradients(*net, local_gradients(*net_, plain_step), formula_->mean_factor());
}

struct Failing : Net {
  Tensor forward(const Tensor& x) {
    return second(torch::tanh(Probe::apply(first(x), torch::zeros({1}, kDouble))));
  }
};

TEST_F(DdpMechanics, AnExceptionThroughTheEngineLeavesTheWrapperUsable) {
  auto net = std::make_shared<Failing>();
  auto model = DistributedDataParallel(net, peers_.group(), options_);
  for (int round = 0; round < 2; ++round) {
    Probe::fail = true;
    EXPECT_THROW(loss_of(model(input())).backward(), std::runtime_error);
    Probe::fail = false;
    net->zero_grad();
    net_->use_side = false;
    loss_of(model(input())).backward();
    expect_gradients(*net, local_gradients(*net_, plain_step), formula_->mean_factor());
  }
}

// The first (1) or the second (2) reduction of a backward fails. backward() must throw the error of
// the reduction.
TEST_F(DdpMechanics, TheEngineHandsOnTheErrorOfTheReduction) {
  for (const int failing : {1, 2}) {
    FakeGroup peers(formula_);
    DistributedDataParallel model{net_, peers.group(), options_};
    int number = 0;
    peers.on_call = [failing, &number](GroupCall& call) {
      call.pass_on();
      if (call.is_reduction_of_values() && ++number == failing) {
        throw Error(ErrorCode::kPeerLost, "rank 2 is gone");
      }
    };
    EXPECT_THAT(error_of([&] { loss_of(model(input())).backward(); }, ErrorCode::kPeerLost),
                HasSubstr("rank 2 is gone"));
    EXPECT_GE(number, failing);
    net_->zero_grad();
  }
}

}  // namespace
}  // namespace cadre
