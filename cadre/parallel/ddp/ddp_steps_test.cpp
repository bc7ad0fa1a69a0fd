// Tests whether the ranks are in the same step. If one rank leaves out a step, all ranks must throw
// before any of them returns a gradient. Programs in which ranks may differ, for example in
// evaluations, must not throw.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/ddp_peers.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;
namespace nn = torch::nn;

constexpr auto kFloat64 = torch::kDouble;

// A module that computes x * weight + bias, element by element, or throws if `throws` is set.
struct Scale : nn::Module {
  Scale() {
    weight = register_parameter("weight", torch::ones({20}, kFloat64));
    bias = register_parameter("bias", torch::zeros({20}, kFloat64));
  }
  Tensor forward(const Tensor& x) {
    if (throws) throw std::runtime_error("bad sample");
    return x * weight + bias;
  }
  Tensor weight, bias;
  bool throws = false;
};

// A loss function whose backward throws before it reaches the model's outputs.
struct BadLoss : torch::autograd::Function<BadLoss> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& y) { return y.sum(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("the loss has no gradient here");
  }
};

using Model = DistributedDataParallel<Scale>;

Tensor rows(double value) {
  return torch::full({4, 20}, value, kFloat64);
}

// A way in which a program leaves out the backward of a step and continues with the next step.
// `losses` keeps the graphs of losses alive until the end of the test.
struct LeftOut {
  const char* name;
  void (*step)(Model& model, const Tensor& x, std::vector<Tensor>& losses);
};

void loss_throws(Model& model, const Tensor& x, std::vector<Tensor>&) {
  try {
    BadLoss::apply(model(x)).backward();
  } catch (const std::runtime_error&) {
    model->zero_grad();
  }
}

void forward_throws(Model& model, const Tensor& x, std::vector<Tensor>&) {
  try {
    model->throws = true;
    model(x).sum().backward();
  } catch (const std::runtime_error&) {
    model->throws = false;
  }
}

void loss_is_nan(Model& model, const Tensor& x, std::vector<Tensor>&) {
  const Tensor loss = model(x * NAN).sum();
  require(std::isnan(loss.item<double>()), "a loss that is a number");
}

void loss_is_nan_and_kept(Model& model, const Tensor& x, std::vector<Tensor>& losses) {
  losses.push_back(model(x * NAN).sum());
}

constexpr LeftOut kLeftOut[] = {{"loss_throws", loss_throws},
                                {"forward_throws", forward_throws},
                                {"loss_is_nan", loss_is_nan},
                                {"loss_is_nan_and_kept", loss_is_nan_and_kept}};

struct LeftOutCase {
  LeftOut left_out;
  int world_size;
  int rank;  // the rank that leaves out the step
  int step;  // the step that it leaves out; the first one is 1
  GradientWeighting weighting;
};

class DdpLeftOut : public ::testing::TestWithParam<LeftOutCase> {};

TEST_P(DdpLeftOut, AStepOnOneRankIsAnErrorOnAllBeforeAnyGradientIsReturned) {
  const LeftOutCase& test = GetParam();
  const auto result = run_groups(test.world_size, [&](const ProcessGroup& group, std::string& out) {
    Model model{std::make_shared<Scale>(),
                group,
                {.weighting = test.weighting, .bucket_caps = {.first_bytes = 64, .bytes = 64}}};
    std::vector<Tensor> losses;
    for (int step = 1; step <= 6 && out.empty(); ++step) {
      model->zero_grad();
      const Tensor x = rows(step);  // equal on all ranks, so the mean gradient is that of each rank
      if (group.rank() == test.rank && step == test.step) {
        test.left_out.step(model, x, losses);
        continue;
      }
      out = testing::failure_of([&] { model(x).sum().backward(); });
      if (out.empty()) {
        require(torch::equal(model->weight.grad(), torch::full({20}, 4.0 * step, kFloat64)),
                format("gradient of another step in step {}", step));
      }
    }
    // Later backwards must throw, too, because the ranks are still in different steps.
    require(testing::failure_of([&] { model(rows(1)).sum().backward(); }) != "", "went on");
    // The error recommends a new wrapper on all ranks, which begins to count steps again. This must
    // work.
    Model again{std::make_shared<Scale>(), group};
    again(rows(1)).sum().backward();
    require(torch::equal(again->weight.grad(), torch::full({20}, 4.0, kFloat64)), "wrapped again");
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  const int other = test.rank == 0 ? 1 : test.rank;
  const int step_of_0 = test.rank == 0 ? test.step + 1 : test.step;
  const int step_of_other = test.rank == 0 ? test.step : test.step + 1;
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.output, AllOf(HasSubstr(format("rank 0 is in step {} and rank {} in step {}",
                                                    step_of_0, other, step_of_other)),
                                   HasSubstr("on all ranks or on none")));
  }
}

std::vector<LeftOutCase> left_out_cases() {
  std::vector<LeftOutCase> cases;
  for (const LeftOut& left_out : kLeftOut) {
    cases.push_back({left_out, 2, 1, 3, GradientWeighting::kEqual});
    cases.push_back({left_out, 3, 0, 1, GradientWeighting::kSamples});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, DdpLeftOut, ::testing::ValuesIn(left_out_cases()),
                         [](const auto& test) {
                           return format("{}_in_step_{}", test.param.left_out.name,
                                         test.param.step);
                         });

// A step has two forwards, each with its own backward. Rank 1 leaves out the first backward and
// runs the second one.
TEST(DdpSteps, OneOfTwoBackwardsLeftOutIsAnErrorOnAll) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    Model model{std::make_shared<Scale>(), group};
    const Tensor a = model(rows(1)).sum();
    const Tensor b = model(rows(100)).sum();
    if (group.rank() == 1) {
      output = testing::failure_of([&] { b.backward(); });
    } else {
      output = testing::failure_of([&] { a.backward(); });
    }
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("rank 0 is in step 1 and rank 1 in step 2"));
  }
}

// Code on which the wrapper must not throw. The test runs it twice, and after each time two plain
// steps must give the right gradient on all ranks.
struct Legal {
  const char* name;
  void (*run)(Model& model, int rank);
};

void as_many_forwards_as_a_rank_likes(Model& model, int rank) {
  Tensor loss = torch::zeros({}, kFloat64);
  for (int i = 0; i <= rank; ++i) loss = loss + model(rows(1)).sum();
  loss.backward();
}

void all_leave_out_a_step(Model& model, int) {
  model(rows(1)).sum();
}

void evaluation_without_grad_on_one_rank(Model& model, int rank) {
  const torch::NoGradGuard no_grad;
  if (rank == 1) model(rows(1));
}

void left_out_under_no_sync(Model& model, int rank) {
  const auto guard = model.no_sync();
  const Tensor loss = model(rows(1)).sum();
  if (rank != 1) loss.backward();
}

void more_parts_under_no_sync(Model& model, int rank) {
  const auto guard = model.no_sync();
  for (int i = 0; i <= rank; ++i) model(rows(1)).sum().backward();
}

void two_backwards_in_reverse(Model& model, int) {
  const Tensor a = model(rows(1)).sum();
  const Tensor b = model(rows(1)).sum();
  b.backward();
  a.backward();
}

void derivatives_of_the_outputs(Model& model, int) {
  const Tensor x = rows(1).requires_grad_(true);
  const Tensor slope = torch::autograd::grad({model(x).pow(2).sum()}, {x}, {},
                                             /*retain_graph=*/true, /*create_graph=*/true)[0];
  slope.pow(2).sum().backward();
}

struct BadBackward : torch::autograd::Function<BadBackward> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("below the outputs");
  }
};

// The output of one forward is the input of the next one. The backward of rank 1 throws before it
// reaches the output of the first forward.
void exception_inside_a_step_of_two_forwards(Model& model, int rank) {
  const Tensor a = model(rows(1));
  Tensor x = a;
  if (rank == 1) x = BadBackward::apply(x);
  const std::string failure = testing::failure_of([&] { model(x).sum().backward(); });
  require(failure.find(rank == 1 ? "below the outputs" : "rank 1 left this backward") !=
              std::string::npos,
          failure);
}

constexpr Legal kLegal[] = {
    {"as_many_forwards_as_a_rank_likes", as_many_forwards_as_a_rank_likes},
    {"all_leave_out_a_step", all_leave_out_a_step},
    {"evaluation_without_grad_on_one_rank", evaluation_without_grad_on_one_rank},
    {"left_out_under_no_sync", left_out_under_no_sync},
    {"more_parts_under_no_sync", more_parts_under_no_sync},
    {"two_backwards_in_reverse", two_backwards_in_reverse},
    {"derivatives_of_the_outputs", derivatives_of_the_outputs},
    {"exception_inside_a_step_of_two_forwards", exception_inside_a_step_of_two_forwards},
};

class DdpLegalSteps : public ::testing::TestWithParam<Legal> {};

TEST_P(DdpLegalSteps, AreNoStepLeftOut) {
  const auto result = run_groups(3, [&](const ProcessGroup& group, std::string&) {
    Model model{std::make_shared<Scale>(), group, {.weighting = GradientWeighting::kEqual}};
    for (int round = 0; round < 2; ++round) {
      GetParam().run(model, group.rank());
      for (int step = 1; step < 3; ++step) {
        model->zero_grad();
        model(rows(step + group.rank())).sum().backward();
        require(
            torch::allclose(model->weight.grad(), torch::full({20}, 4.0 * (step + 1), kFloat64)),
            format("round {}, step {}", round, step));
      }
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

INSTANTIATE_TEST_SUITE_P(Cases, DdpLegalSteps, ::testing::ValuesIn(kLegal),
                         [](const auto& test) { return test.param.name; });

TEST(DdpSteps, AStepLeftOutIsNotHiddenByAnExceptionInTheNext) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    Model model{std::make_shared<Scale>(), group};
    for (int step = 1; step <= 4; ++step) {
      model->zero_grad();
      Tensor y = model(rows(step));
      if (group.rank() == 1 && step == 1) continue;
      if (group.rank() == 1 && step == 2) y = model(BadBackward::apply(y));
      const std::string failure = testing::failure_of([&] { y.sum().backward(); });
      output += failure.empty() ? "none;" : failure + ";";
    }
  });
  // The last backward of rank 0 fails, because rank 1 has run one backward less and does not take
  // part.
  EXPECT_THAT(result.ranks[0].output, HasSubstr("rank 0 is in step 1 and rank 1 in step 2"));
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, ::testing::Not(HasSubstr("none;")));
  }
}

// Two wrappers of equal models, as in an ensemble. Their buckets have equal sizes, so reductions of
// one could be mixed up with those of the other.
struct TwoModelsCase {
  const char* name;
  GradientWeighting weighting;
  int64_t cap_bytes;  // the bucket cap: large for one bucket, small for several
};

class DdpTwoModels : public ::testing::TestWithParam<TwoModelsCase> {};

TEST_P(DdpTwoModels, ABackwardLeftOutInOneIsAnErrorInThePassThatMeetsTheOther) {
  const int64_t cap = GetParam().cap_bytes;
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    const DistributedDataParallelOptions options{.weighting = GetParam().weighting,
                                                 .bucket_caps = {.first_bytes = cap, .bytes = cap}};
    Model a{std::make_shared<Scale>(), group, options};
    Model b{std::make_shared<Scale>(), group, options};
    for (int step = 1; step <= 2; ++step) {
      a->zero_grad();
      b->zero_grad();
      const Tensor loss = a(rows(1)).sum();
      const bool leaves_out = group.rank() == 0 && step == 2;
      if (!leaves_out) output += testing::failure_of([&] { loss.backward(); });
      // The reduction of `a` on this rank has run together with that of `b` on rank 0.
      if (step == 2 && group.rank() == 1) break;
      output += testing::failure_of([&] { b(rows(100)).sum().backward(); });
      if (!output.empty() || leaves_out) continue;
      require(torch::equal(a->weight.grad(), torch::full({20}, 4.0, kFloat64)), "gradient of a");
      require(torch::equal(b->weight.grad(), torch::full({20}, 400.0, kFloat64)), "gradient of b");
    }
    require(!output.empty(), "the two models were averaged with each other");
    Model again{std::make_shared<Scale>(), group, options};
    again(rows(1)).sum().backward();
    require(torch::equal(again->weight.grad(), torch::full({20}, 4.0, kFloat64)), "wrapped again");
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.output, AllOf(HasSubstr("the ranks run backward() of different wrappers"),
                                   HasSubstr("Scale"),
                                   ::testing::ContainsRegex("rank 0 uses wrapper #[0-9]+ "
                                                            "and rank 1 uses wrapper #[0-9]+")));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, DdpTwoModels,
    ::testing::Values(TwoModelsCase{"one_bucket", GradientWeighting::kEqual, 1 << 20},
                      TwoModelsCase{"buckets", GradientWeighting::kEqual, 64},
                      TwoModelsCase{"weighted_buckets", GradientWeighting::kSamples, 64}),
    [](const auto& test) { return test.param.name; });

struct BufferedScale : Scale {
  BufferedScale() { count = register_buffer("count", torch::zeros({1}, kFloat64)); }
  Tensor forward(const Tensor& x) {
    count += x[0][0];
    return Scale::forward(x);
  }
  Tensor count;
};

TEST(DdpTwoModelsBuffers, ForwardsInAnotherOrderOnOneRankAreAnErrorInTheNextBackward) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    DistributedDataParallel a{std::make_shared<BufferedScale>(), group};
    DistributedDataParallel b{std::make_shared<BufferedScale>(), group};
    a(rows(1)).sum().backward();
    b(rows(100)).sum().backward();
    a->zero_grad();
    b->zero_grad();
    Tensor of_a, of_b;
    if (group.rank() == 0) of_a = a(rows(1));
    of_b = b(rows(100));
    if (group.rank() == 1) of_a = a(rows(1));
    output = testing::failure_of([&] { of_a.sum().backward(); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("ran forwards of different wrappers before it"));
  }
}

// Rank 0 leaves out the step of `a` and continues with `b`. So the forwards of `a` on the other
// ranks get the buffers of rank 0's `b`, and then reductions of the two models run together.
TEST(DdpTwoModelsBuffers, AWholeStepLeftOutInOneIsAnErrorInThePassThatMeetsTheOther) {
  const auto result = run_groups(3, [](const ProcessGroup& group, std::string& output) {
    DistributedDataParallel a{std::make_shared<BufferedScale>(), group};
    DistributedDataParallel b{std::make_shared<BufferedScale>(), group};
    a(rows(1)).sum().backward();
    b(rows(100)).sum().backward();
    auto& next = group.rank() == 0 ? b : a;
    output = testing::failure_of([&] { next(rows(1)).sum().backward(); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("got the buffers of another wrapper"));
  }
}

TEST(DdpTwoModelsMean, OfDifferentWrappersIsAnErrorOnAllRanks) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    Model a{std::make_shared<Scale>(), group};
    Model b{std::make_shared<Scale>(), group};
    a(rows(1));
    b(rows(1));
    require(a.mean_over_ranks(torch::tensor(double(group.rank()))) == 0.5, "mean of one wrapper");
    output = testing::failure_of(
        [&] { (group.rank() == 0 ? a : b).mean_over_ranks(torch::ones({}, kFloat64)); });
    require(b.mean_over_ranks(torch::tensor(double(group.rank()))) == 0.5, "mean after the error");
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const testing::RankOutcome& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("mean_over_ranks() of different wrappers"));
  }
}

TEST(DdpSteps, ForwardsLeftBehindOnAllRanksAreLoggedOnceByRankZero) {
  const auto log = std::make_shared<testing::LogLines>();
  const auto result = run_groups(2,
                                 [](const ProcessGroup& group, std::string&) {
                                   Model model{std::make_shared<Scale>(), group};
                                   model(rows(1)).sum().backward();
                                   // Each rank has some forwards without a backward: rank 1 an
                                   // evaluation with grad and step 4, rank 0 step 1, and both ranks
                                   // step 3.
                                   if (group.rank() == 1) model(rows(1));
                                   for (int step = 1; step <= 4; ++step) {
                                     const Tensor loss = model(rows(step)).sum();
                                     if ((group.rank() == 0 && step == 1) || step == 3) continue;
                                     if (group.rank() == 1 && step == 4) continue;
                                     loss.backward();
                                   }
                                 },
                                 {.log = log});
  std::vector<std::string> lines;
  for (const std::string& line : log->get()) {
    if (line.find("left behind") != std::string::npos) lines.push_back(line);
  }
  ASSERT_EQ(lines.size(), 1u) << result.failures();
  EXPECT_THAT(lines[0], AllOf(HasSubstr("count=1"), HasSubstr("Scale")));
}

Tensor loss_of_a_wrapper_that_ends(const std::shared_ptr<Scale>& net, const ProcessGroup& group) {
  Model model{net, group};
  return model(rows(1)).sum();
}

TEST(DdpLifetime, ABackwardAfterTheWrapperIsGoneThrows) {
  const testing::FakeGroup peers(std::make_shared<testing::DdpPeers>(2));
  const auto net = std::make_shared<Scale>();
  const Tensor loss = loss_of_a_wrapper_that_ends(net, peers.group());
  EXPECT_EQ(peers.num_owners(), 0) << "a graph keeps no group";
  EXPECT_THAT(
      testing::failure_of([&] { loss.backward({}, /*retain_graph=*/true); }),
      AllOf(HasSubstr("wrapper was destroyed"), HasSubstr("until backward() has returned")));
  EXPECT_FALSE(net->weight.grad().defined());
  EXPECT_THAT(testing::failure_of([&] {
                torch::autograd::backward({loss}, {}, /*retain_graph=*/true, /*create_graph=*/false,
                                          {net->weight});
              }),
              HasSubstr("wrapper was destroyed"));
  // A backward that reaches no parameter does not involve the wrapper.
  const Tensor x = rows(1).requires_grad_(true);
  Tensor y;
  {
    Model model{net, peers.group()};
    y = model(x).sum();
  }
  EXPECT_TRUE(torch::equal(torch::autograd::grad({y}, {x})[0], torch::ones({4, 20}, kFloat64)));
}

TEST(DdpLifetime, NothingIsLeftOfAWrapperItsModuleAndItsGraph) {
  const testing::FakeGroup peers(std::make_shared<testing::DdpPeers>(2));
  std::weak_ptr<Scale> net;
  c10::weak_intrusive_ptr<c10::TensorImpl> weight(c10::intrusive_ptr<c10::TensorImpl>{});
  {
    const auto strong = std::make_shared<Scale>();
    net = strong;
    weight = c10::weak_intrusive_ptr<c10::TensorImpl>(strong->weight.getIntrusivePtr());
    Tensor loss = loss_of_a_wrapper_that_ends(strong, peers.group());
    Model model{strong, peers.group()};
    model(rows(1)).sum().backward();
    loss = model(rows(1)).sum();
  }
  EXPECT_TRUE(net.expired());
  EXPECT_TRUE(weight.expired());
  EXPECT_EQ(peers.num_owners(), 0);
}

}  // namespace
}  // namespace cadre
