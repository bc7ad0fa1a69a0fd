// Tests which forwards belong to a backward. If they differ between the ranks, the backward must
// throw. The weight of a rank must be computed from the samples of these forwards only.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;

struct Bomb : torch::autograd::Function<Bomb> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("bomb in the backward");
  }
};

// y = x * weight: the gradient of y.mean() is the mean of the rows.
struct RowMean : torch::nn::Module {
  RowMean() { weight = register_parameter("weight", torch::ones({1}, torch::kDouble)); }
  Tensor forward(const Tensor& x) {
    const Tensor y = x * weight;
    if (throws) throw std::runtime_error("bad sample");
    return is_armed ? Bomb::apply(y) : y;
  }
  double gradient() const {
    return weight.grad().defined() ? weight.grad().item<double>() : std::nan("");
  }
  Tensor weight;
  bool throws = false;
  bool is_armed = false;
};

using RowMeanModel = DistributedDataParallel<RowMean>;

Tensor rows_of(int64_t count, double value) {
  return torch::full({count, 1}, value, torch::kDouble);
}

void expect_gradient(const RowMeanModel& model, double expected) {
  require(std::abs(model->gradient() - expected) < 1e-12,
          format("gradient {}, expected {}", model->gradient(), expected));
}

// Runs `body` on two ranks with a model in float64 whose gradients are weighted by samples.
testing::RanksResult on_two_ranks(
    const std::function<void(RowMeanModel&, int rank, std::string& output)>& body) {
  return run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    RowMeanModel model{std::make_shared<RowMean>(), group};
    body(model, group.rank(), output);
  });
}

TEST(DdpCarriedForwards, AKeptLossOfAStepLeftOutIsNotHiddenByAnException) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string& output) {
    std::vector<Tensor> history;
    for (int step = 1; step <= 5; ++step) {
      model->zero_grad();
      model->is_armed = rank == 0 && step == 2;
      history.push_back(model(rows_of(1, step)).mean());
      // Rank 0 skips this backward, as if its loss were not finite.
      if (rank == 0 && step == 1) continue;
      const std::string failure = failure_of([&] { history.back().backward(); });
      output += failure.empty() ? format("gradient {} in step {};", model->gradient(), step)
                                : failure + ";";
    }
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, AllOf(HasSubstr("rank 0 is in step 2 and rank 1 in step 1"),
                                   ::testing::Not(HasSubstr("gradient "))));
  }
}

TEST(DdpCarriedForwards, TheNewerOfTwoForwardsLeftOutIsAnErrorInThatStep) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string& output) {
    const Tensor a = model(rows_of(1, 1)).mean();
    const Tensor b = model(rows_of(1, 10)).mean();
    output = failure_of([&] { (rank == 0 ? a : a + b).backward(); });
    if (output.empty()) output = format("gradient {}", model->gradient());
    // Later backwards must throw, too, although both ranks now have the same number of forwards
    // without a backward.
    if (rank == 1) model(rows_of(1, 1));
    require(failure_of([&] { model(rows_of(1, 1)).mean().backward(); }) != "", "went on");
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("1 newer forward on rank 0 and 0 on rank 1"));
  }
}

// Each rank leaves out the backward of one of three forwards: rank 0 that of the first, rank 1 that
// of the second.
TEST(DdpCarriedForwards, DifferentForwardsLeftOutAreAnErrorThoughTheirNumberIsEqual) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string& output) {
    model(rows_of(1, 1)).mean().backward();
    model(rows_of(1, 1));  // no rank runs the backward of this forward
    model->zero_grad();
    const Tensor a = model(rows_of(1, 1)).mean();
    const Tensor b = model(rows_of(1, 10)).mean();
    const Tensor c = model(rows_of(1, 100)).mean();
    output = failure_of([&] { (rank == 0 ? b + c : a + c).backward(); });
    if (output.empty()) output = format("gradient {}", model->gradient());
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output, HasSubstr("not the same ones on rank 0 and rank 1"));
  }
}

TEST(DdpCarriedForwards, AForwardThatThrowsUnderNoSyncIsNotCounted) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string&) {
    const double value = rank == 0 ? 1 : 3;
    {
      const auto guard = model.no_sync();
      model->throws = rank == 0;
      failure_of([&] { model(rows_of(8, value)); });
      model->throws = false;
      // This forward has no backward, so its 5 or 2 rows must not count.
      const Tensor not_finite = model(rows_of(rank == 0 ? 5 : 2, value)).mean();
      (model(rows_of(8, value)).mean() / 2).backward();
    }
    (model(rows_of(8, value)).mean() / 2).backward();
    expect_gradient(model, 2);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DdpCarriedForwards, ASaidCountHoldsUntilAForwardReturns) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string&) {
    const auto guard = model.no_sync();
    model.set_num_samples(rank == 0 ? 3 : 1);
    model->throws = true;
    failure_of([&] { model(rows_of(8, 1)); });
    model->throws = false;
    model(rows_of(8, 1 + 4 * rank)).mean().backward();
    model.reduce_gradients();
    expect_gradient(model, (3 * 1 + 1 * 5) / 4.0);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DdpCarriedForwards, ABackwardThatThrowsUnderNoSyncIsNotCounted) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string&) {
    const double value = rank == 0 ? 1 : 3;
    {
      const auto guard = model.no_sync();
      model->is_armed = rank == 0;
      if (rank == 0) failure_of([&] { model(rows_of(8, value)).mean().backward(); });
      model->is_armed = false;
      (model(rows_of(8, value)).mean() / 2).backward();
    }
    (model(rows_of(8, value)).mean() / 2).backward();
    expect_gradient(model, 2);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DdpCarriedForwards, AnAccumulationThatIsClearedNoLongerWeighs) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string&) {
    for (const bool set_to_none : {true, false}) {
      {
        const auto guard = model.no_sync();
        model(rows_of(rank == 0 ? 8 : 1, 1)).mean().backward();
      }
      model->zero_grad(set_to_none);  // no rank steps with these gradients
      model(rows_of(8, rank == 0 ? 1 : 3)).mean().backward();
      expect_gradient(model, 2);
      model->zero_grad();
    }
    // The program clears the gradients between a forward and its backward. The cleared ones, of 8
    // rows and of 1 row, must not count.
    for (const bool set_to_none : {true, false}) {
      const auto guard = model.no_sync();
      model(rows_of(rank == 0 ? 8 : 1, 1)).mean().backward();
      const Tensor loss = model(rows_of(8, rank == 0 ? 1 : 3)).mean();
      model->zero_grad(set_to_none);
      loss.backward();
      model.reduce_gradients();
      expect_gradient(model, 2);
      model->zero_grad();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(DdpCarriedForwards, GradientsChangedByHandKeepTheirSamples) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string&) {
    for (const bool in_place : {true, false}) {
      {
        const auto guard = model.no_sync();
        model(rows_of(rank == 0 ? 3 : 1, rank == 0 ? 2 : 6)).mean().backward();
      }
      Tensor& gradient = model->weight.mutable_grad();
      if (in_place) {
        gradient.mul_(0.5);
      } else {
        gradient = gradient * 0.5;
      }
      model.reduce_gradients();
      expect_gradient(model, (3 * 1 + 1 * 3) / 4.0);
      model->zero_grad();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The backward is of a and b, in which the ranks have different proportions of the samples: 8 and 4
// rows on rank 0, 4 and 4 on rank 1. It must throw. Counting c (4 and 8 rows), which has no
// backward yet, would hide the difference.
TEST(DdpCarriedForwards, UnlikeSharesAreRefusedWhateverElseWaits) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string& output) {
    const Tensor a = model(rank == 0 ? rows_of(8, 1) : rows_of(4, 4)).mean();
    const Tensor b = model(rows_of(4, 0)).mean();
    const Tensor c = model(rows_of(rank == 0 ? 4 : 8, 0)).mean();
    output = failure_of([&] { (a + b).backward(); });
    if (output.empty()) output = format("gradient {}", model->gradient());
    model->zero_grad();
    c.backward();  // a plain backward, which must be correct
    expect_gradient(model, 0);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_THAT(rank.output, HasSubstr("one weight"));
}

TEST(DdpCarriedForwards, AForwardThatAllLeftOutHasNoPartInTheWeight) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string& output) {
    model(rows_of(rank == 0 ? 0 : 4, 1));
    const Tensor a = model(rank == 0 ? rows_of(8, 1) : rows_of(4, 4)).mean();
    const Tensor b = model(rows_of(4, 0)).mean();
    output = failure_of([&] { (a + b).backward(); });
    if (output.empty()) output = format("gradient {}", model->gradient());
    model->zero_grad();
    // The ranks have equal numbers of rows in c and d. Their unequal numbers of rows in the forward
    // before, which has no backward, must not count.
    model(rows_of(rank == 0 ? 10 : 1, 1));
    const Tensor c = model(rows_of(4, 1)).mean();
    const Tensor d = model(rows_of(8, 1)).mean();
    (c + d).backward();
    expect_gradient(model, 2);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_THAT(rank.output, HasSubstr("one weight"));
}

// The sample counts of 20 forwards do not fit into one message (agreement/sample_weight.h), so a
// second message is needed to compare all of them. A difference in any forward must be an error.
TEST(DdpCarriedForwards, EveryOneOfManyForwardsIsCompared) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string& output) {
    const auto sum_of_20 = [&](int64_t rows_of_the_first) {
      Tensor loss = model(rows_of(rows_of_the_first, 1)).mean();
      for (int i = 1; i < 20; ++i) loss = loss + model(rows_of(4 + 4 * (i % 2), 1)).mean();
      return loss;
    };
    sum_of_20(4).backward();
    expect_gradient(model, 20);
    model->zero_grad();
    output = failure_of([&] { sum_of_20(4 + rank).backward(); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_THAT(rank.output, HasSubstr("one weight"));
}

TEST(DdpCarriedForwards, SeveralForwardsAfterAnAccumulationNeedItsShares) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string& output) {
    const auto pass_after = [&](int64_t accumulated) {
      {
        const auto guard = model.no_sync();
        (model(rows_of(accumulated, 1)).mean() / 2).backward();
      }
      const Tensor a = model(rows_of(4, 1)).mean();
      const Tensor b = model(rows_of(4, 1)).mean();
      (a / 4 + b / 4).backward();
    };
    pass_after(8);
    expect_gradient(model, 1);
    model->zero_grad();
    output = failure_of([&] { pass_after(rank == 0 ? 8 : 4); });
    model->zero_grad();
    // The error recommends to divide by the number of all samples, 16 on rank 0 and 12 on rank 1.
    // This must give the right gradient.
    {
      const auto guard = model.no_sync();
      const double value = 1 + rank;
      const int64_t first = rank == 0 ? 8 : 4;
      const double all = static_cast<double>(first) + 8;
      (model(rows_of(first, value)).sum() / all).backward();
      const Tensor a = model(rows_of(4, value)).sum();
      const Tensor b = model(rows_of(4, value)).sum();
      ((a + b) / all).backward();
    }
    model.reduce_gradients();
    expect_gradient(model, (16 * 1 + 12 * 2) / 28.0);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_THAT(rank.output, HasSubstr("one weight"));
}

// The backward reaches the forward whose gradient is penalised, but not through its output. If the
// ranks have another proportion of its rows than of the other forward's rows (4 and 8, but 4 and
// 4), the backward must throw.
TEST(DdpCarriedForwards, APenaltyOnAForwardOfAnotherShareIsRefused) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string& output) {
    const auto critic_step = [&](int64_t penalised_rows) {
      const Tensor x = rows_of(penalised_rows, 1).requires_grad_(true);
      const Tensor slope = torch::autograd::grad({model(x).sum()}, {x}, {}, /*retain_graph=*/true,
                                                 /*create_graph=*/true)[0];
      const Tensor score = model(rows_of(4, 1)).mean();
      (score + slope.pow(2).sum(1).mean()).backward();
    };
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      critic_step(4);
      expect_gradient(model, 3);
    }
    model->zero_grad();
    output = failure_of([&] { critic_step(4 + 4 * rank); });
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_THAT(rank.output, HasSubstr("one weight"));
}

// A module that keeps the hidden tensor from which its output is computed. A backward from the
// hidden tensor does not go through the output.
struct Tapped : torch::nn::Module {
  Tapped() { weight = register_parameter("weight", torch::ones({1}, torch::kDouble)); }
  Tensor forward(const Tensor& x) {
    hidden = x * weight;
    return hidden.square();
  }
  Tensor weight, hidden;
};

// A backward from a hidden tensor may belong to any forward that had no backward yet. It is correct
// if the ranks have the same proportion of rows in all of these forwards (3 to 1), and must throw
// otherwise.
TEST(DdpCarriedForwards, ABackwardPastTheOutputsNeedsOneShareOfAllThatWait) {
  const auto result = run_groups(2, [](const ProcessGroup& group, std::string& output) {
    const bool is_first = group.rank() == 0;
    DistributedDataParallel model{std::make_shared<Tapped>(), group};
    const auto hidden_mean = [&model](const Tensor& x) {
      model(x);
      return model->hidden.mean();
    };
    for (int step = 0; step < 2; ++step) {
      const Tensor older = hidden_mean(rows_of(is_first ? 3 : 1, is_first ? 4 : 8));
      hidden_mean(rows_of(is_first ? 3 : 1, 100));
      older.backward();
      require(model->weight.grad().item<double>() == (3 * 4 + 1 * 8) / 4.0, "by 3 rows and 1");
      model->zero_grad();
    }
    const Tensor older = hidden_mean(is_first ? rows_of(8, 1) : rows_of(4, 4));
    hidden_mean(rows_of(4, 100));
    output = failure_of([&] { older.backward(); });
    if (output.empty()) output = format("gradient {}", model->weight.grad().item<double>());
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) EXPECT_THAT(rank.output, HasSubstr("one weight"));
}

TEST(DdpCarriedForwards, APenaltyAloneHasTheWeightOfItsOwnForward) {
  const auto result = on_two_ranks([](RowMeanModel& model, int rank, std::string&) {
    model(rows_of(rank == 0 ? 7 : 1, 1));  // no rank runs the backward of this forward
    const Tensor x = rows_of(rank == 0 ? 3 : 1, 1).requires_grad_(true);
    const Tensor slope = torch::autograd::grad({model(x).sum()}, {x}, {}, /*retain_graph=*/true,
                                               /*create_graph=*/true)[0];
    const Tensor later = model(rows_of(1, 1)).mean();
    (slope.pow(2).sum(1).mean() * (rank == 0 ? 1 : 3)).backward();
    expect_gradient(model, 2 * (3 * 1 + 1 * 3) / 4.0);
    model->zero_grad();
    later.backward();
    expect_gradient(model, 1);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
