// Compares ModelAverager with the formulas of each method, computed for all ranks in double
// precision in the test, and with the optimizers of libtorch.
#include "cadre/parallel/averaging/model_averager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/comm_hooks/comm_hooks.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/rank_expectations.h"

namespace cadre::model_averaging {
namespace {

using testing::expect_on_ranks;
using testing::failure_of;
using testing::require;
using testing::require_refused;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kNumSteps = 9;

// A tied weight, a frozen one, a transposed one, and buffers of two kinds.
struct Model : nn::Module {
  explicit Model(torch::ScalarType dtype = torch::kDouble) {
    const auto options = torch::TensorOptions().dtype(dtype);
    weight = register_parameter("weight", torch::linspace(-1, 1, 6, options).view({2, 3}));
    again = register_module("tied", std::make_shared<nn::Module>())
                ->register_parameter("again", weight);
    turned = register_parameter("turned", torch::linspace(0, 3, 8, options).view({4, 2}).t());
    frozen = register_parameter("frozen", torch::ones({3}, options), /*requires_grad=*/false);
    mean = register_buffer("mean", torch::zeros({2}, options));
    count = register_buffer("count", torch::zeros({}, torch::kLong));
  }
  Tensor weight, again, turned, frozen, mean, count;
};

// What one step of rank `rank` does to the trained parameters: a contraction, and a value of the
// rank and the step, so that ranks drift apart.
Tensor trained(const Tensor& value, int64_t step, int rank) {
  const double change = std::sin(3.0 * static_cast<double>(step) + 1.7 * rank);
  return value * (0.9 + 0.01 * rank) + change * torch::arange(1, value.numel() + 1, torch::kDouble)
                                                    .view(value.sizes())
                                                    .to(value.scalar_type());
}

void train(Model& model, int64_t step, int rank) {
  const torch::NoGradGuard no_grad;
  model.weight.copy_(trained(model.weight, step, rank));
  model.turned.copy_(trained(model.turned, step, rank));
  model.mean.copy_(trained(model.mean, step, rank));
  model.count.add_(rank);
}

// The values of one parameter on all ranks, one row for each rank.
using Rows = std::vector<Tensor>;

Rows repeated(const Tensor& value, int num_ranks) {
  Rows rows;
  for (int rank = 0; rank < num_ranks; ++rank) rows.push_back(value.clone());
  return rows;
}

Tensor mean_of(const Rows& rows, int begin, int size) {
  Tensor sum = torch::zeros_like(rows[0]);
  for (int rank = begin; rank < begin + size; ++rank) sum = sum + rows[static_cast<size_t>(rank)];
  return sum / size;
}

void set_means(Rows& rows, int size) {
  const Rows before = rows;
  for (int rank = 0; rank < static_cast<int>(rows.size()); ++rank) {
    rows[static_cast<size_t>(rank)] = mean_of(before, rank / size * size, size);
  }
}

// What a method does to the rows after step `step`.
using Formula = std::function<void(Rows& rows, int64_t step)>;

Rows train_rows(const Tensor& first, int num_ranks, const Formula& formula) {
  Rows rows = repeated(first.detach(), num_ranks);
  for (int64_t step = 1; step <= kNumSteps; ++step) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      auto& row = rows[static_cast<size_t>(rank)];
      row = trained(row, step, rank);
    }
    formula(rows, step);
  }
  return rows;
}

bool is_close(const Tensor& a, const Tensor& b) {
  return torch::allclose(a.detach(), b.detach(), 1e-12, 1e-13);
}

// Trains on each number of ranks, and compares each rank with its row of the formula. make_formula:
// a formula may keep values of its own, so each parameter gets another one.
void expect_formula(const std::vector<int>& numbers_of_ranks, const ModelAveragerOptions& options,
                    const std::function<Formula(int num_ranks)>& make_formula) {
  const Model initial;
  for (const int num_ranks : numbers_of_ranks) {
    const Rows weight = train_rows(initial.weight, num_ranks, make_formula(num_ranks));
    const Rows turned = train_rows(initial.turned, num_ranks, make_formula(num_ranks));
    expect_on_ranks(num_ranks, [&](const ProcessGroup& group) {
      const auto model = std::make_shared<Model>();
      ModelAverager averager{model, group, options};
      for (int64_t step = 1; step <= kNumSteps; ++step) {
        train(*model, step, group.rank());
        averager.step();
      }
      const auto rank = static_cast<size_t>(group.rank());
      require(is_close(model->weight, weight[rank]), format("weight on {} ranks", num_ranks));
      require(is_close(model->turned, turned[rank]), format("turned on {} ranks", num_ranks));
      require(model->again.is_same(model->weight), "the weight is still tied");
      require(torch::equal(model->frozen, torch::ones({3}, torch::kDouble)), "the frozen one");
      require(averager.num_steps() == kNumSteps, "the steps");
    });
  }
}

// Steps 3, 5, 7 and 9 average: after the warm-up of two steps, each second one.
TEST(ModelAverager, PeriodicAveragingFollowsItsFormula) {
  expect_formula({1, 2, 3, 4}, {.method = PeriodicAveraging{.period = 2, .warmup_steps = 2}},
                 [](int num_ranks) {
                   return [=](Rows& rows, int64_t step) {
                     if (step >= 3 && step % 2 == 1) set_means(rows, num_ranks);
                   };
                 });
}

// The last level that is due averages, and no other. With period 2 and 4, steps 3 and 7 average
// pairs, and steps 5 and 9 all; step 1 is in the warm-up.
TEST(ModelAverager, HierarchicalAveragingFollowsItsFormula) {
  for (const int num_ranks : {4, 8}) {
    expect_formula(
        {num_ranks},
        {.method = HierarchicalAveraging{.levels = {{.period = 2, .group_size = 2},
                                                    {.period = 4, .group_size = num_ranks}},
                                         .warmup_steps = 1}},
        [](int ranks) {
          return [=](Rows& rows, int64_t step) {
            if (step == 3 || step == 7) set_means(rows, 2);
            if (step == 5 || step == 9) set_means(rows, ranks);
          };
        });
  }
}

// SGD with Nesterov momentum, as PyTorch defines it.
TEST(ModelAverager, DiLoCoFollowsItsFormula) {
  constexpr double kRate = 0.6;
  constexpr double kMomentum = 0.8;
  const Model initial;
  const auto expected_of = [&](const Tensor& first, int num_ranks) {
    Tensor weights = first.detach().clone();
    Tensor velocity;
    return train_rows(first, num_ranks, [&, num_ranks](Rows& rows, int64_t step) {
      if (step % 3 != 0) return;
      const Tensor gradient = weights - mean_of(rows, 0, num_ranks);
      velocity = velocity.defined() ? kMomentum * velocity + gradient : gradient.clone();
      weights = weights - kRate * (gradient + kMomentum * velocity);
      rows = repeated(weights, num_ranks);
    });
  };
  for (const int num_ranks : {1, 2, 3, 4}) {
    const Rows weight = expected_of(initial.weight, num_ranks);
    const Rows turned = expected_of(initial.turned, num_ranks);
    expect_on_ranks(num_ranks, [&](const ProcessGroup& group) {
      const auto model = std::make_shared<Model>();
      ModelAverager averager{
          model,
          group,
          {.method = DiLoCo{.period = 3, .learning_rate = kRate, .momentum = kMomentum}}};
      for (int64_t step = 1; step <= kNumSteps; ++step) {
        train(*model, step, group.rank());
        require(averager.step() == (step % 3 == 0), "the period");
        require(averager.is_synchronized() == (step % 3 == 0), "equal on all ranks");
      }
      const auto rank = static_cast<size_t>(group.rank());
      require(is_close(model->weight, weight[rank]), format("weight on {} ranks", num_ranks));
      require(is_close(model->turned, turned[rank]), format("turned on {} ranks", num_ranks));
    });
  }
}

// The product with the mixing matrix of each exchange.
void mix(Rows& rows, GossipGraph graph, int64_t exchange) {
  const Rows before = rows;
  const auto n = static_cast<int64_t>(rows.size());
  Tensor matrix = torch::zeros({n, n}, torch::kDouble);
  if (graph == GossipGraph::kRing) {
    // Pairs begin at rank `exchange`; who has none keeps its model.
    for (int64_t pair = 0; pair < n / 2; ++pair) {
      const int64_t a = (exchange + 2 * pair) % n;
      const int64_t b = (a + 1) % n;
      matrix[a][a] = matrix[a][b] = matrix[b][a] = matrix[b][b] = 0.5;
    }
    if (n % 2 == 1) matrix[(exchange + n - 1) % n][(exchange + n - 1) % n] = 1;
  } else {
    const int64_t num_distances = n <= 2 ? 1 : n <= 4 ? 2 : 3;
    const int64_t distance = int64_t{1} << (exchange % num_distances);
    for (int64_t rank = 0; rank < n; ++rank) {
      matrix[rank][rank] += 0.5;
      matrix[rank][(rank + n - distance) % n] += 0.5;
    }
  }
  // Columns and rows add up to 1, so the mean of the ranks is kept.
  EXPECT_TRUE(torch::equal(matrix.sum(0), torch::ones({n}, torch::kDouble)));
  EXPECT_TRUE(torch::equal(matrix.sum(1), torch::ones({n}, torch::kDouble)));
  for (int64_t rank = 0; rank < n; ++rank) {
    Tensor sum = torch::zeros_like(before[0]);
    for (int64_t other = 0; other < n; ++other) {
      sum = sum + matrix[rank][other] * before[static_cast<size_t>(other)];
    }
    rows[static_cast<size_t>(rank)] = sum;
  }
}

TEST(ModelAverager, GossipFollowsItsMixingMatrix) {
  for (const GossipGraph graph : {GossipGraph::kRing, GossipGraph::kExponential}) {
    expect_formula({2, 3, 4, 5, 8}, {.method = Gossip{.graph = graph, .period = 2}}, [&](int) {
      return [=](Rows& rows, int64_t step) {
        if (step % 2 == 0) mix(rows, graph, step / 2 - 1);
      };
    });
  }
}

// 2^k ranks that do not train between the exchanges agree after k exchanges, at the mean.
TEST(ModelAverager, TheExponentialGraphReachesTheMean) {
  expect_on_ranks(8, [](const ProcessGroup& group) {
    const auto model = std::make_shared<Model>();
    ModelAverager averager{model, group, {.method = Gossip{.graph = GossipGraph::kExponential}}};
    {
      const torch::NoGradGuard no_grad;
      model->weight.fill_(std::pow(2.0, group.rank()));
    }
    for (int i = 0; i < 3; ++i) averager.step();
    require(is_close(model->weight, torch::full({2, 3}, 255.0 / 8, torch::kDouble)), "the mean");
  });
}

TEST(ModelAverager, SynchronizeMakesTheRanksEqualAtTheirMean) {
  for (const AveragingMethod& method :
       {AveragingMethod(PeriodicAveraging{.period = 100, .warmup_steps = 100}),
        AveragingMethod(Gossip{.period = 100}),
        AveragingMethod(DiLoCo{.period = 100, .learning_rate = 1, .momentum = 0})}) {
    expect_on_ranks(3, [&](const ProcessGroup& group) {
      const auto model = std::make_shared<Model>();
      ModelAverager averager{model, group, {.method = method}};
      Rows rows = repeated(model->weight.detach(), 3);
      for (int rank = 0; rank < 3; ++rank) {
        rows[static_cast<size_t>(rank)] = trained(rows[static_cast<size_t>(rank)], 1, rank);
      }
      train(*model, 1, group.rank());
      averager.step();
      require(!averager.is_synchronized(), "the ranks have trained");
      averager.synchronize();
      require(averager.is_synchronized() && averager.num_steps() == 1, "no step");
      require(is_close(model->weight, mean_of(rows, 0, 3)), "the mean");
    });
  }
}

// 16 bits: the mean of the ranks is rounded once, and DiLoCo keeps its weights in float32.
TEST(ModelAverager, ParametersOf16BitsAreRoundedOnce) {
  expect_on_ranks(3, [](const ProcessGroup& group) {
    const auto model = std::make_shared<Model>(torch::kBFloat16);
    ModelAverager averager{model, group, {.method = PeriodicAveraging{}}};
    const std::vector<float> values = {256, 2, 1};  // 256 + 2 and 256 + 1 are no bfloat16
    {
      const torch::NoGradGuard no_grad;
      model->weight.fill_(values[static_cast<size_t>(group.rank())]);
    }
    averager.step();
    const Tensor expected = torch::full({2, 3}, 259.0F / 3).to(torch::kBFloat16);
    require(torch::equal(model->weight.detach(), expected), "the mean, rounded once");
    const AveragerState state = ModelAverager{model, group, {.method = DiLoCo{}}}.state();
    require(state[1].second.scalar_type() == torch::kFloat, "float32");
  });
  // The sum of two large float16 numbers is no float16.
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto model = std::make_shared<Model>(torch::kHalf);
    ModelAverager averager{model, group, {.method = Gossip{}}};
    {
      const torch::NoGradGuard no_grad;
      model->weight.fill_(group.rank() == 0 ? 60000 : 50016);
    }
    averager.step();
    require(model->weight[0][0].item<float>() == 55008.0F, "no overflow");
  });
}

TEST(ModelAverager, BuffersAreAveragedIfTheProgramSaysSo) {
  for (const bool is_averaged : {false, true}) {
    for (const AveragingMethod& method :
         {AveragingMethod(PeriodicAveraging{}), AveragingMethod(Gossip{}),
          AveragingMethod(DiLoCo{.period = 1})}) {
      expect_on_ranks(2, [&](const ProcessGroup& group) {
        const auto model = std::make_shared<Model>();
        ModelAverager averager{model, group, {.method = method, .average_buffers = is_averaged}};
        train(*model, 1, group.rank());
        averager.step();
        Rows rows = repeated(torch::zeros({2}, torch::kDouble), 2);
        for (int rank = 0; rank < 2; ++rank) {
          rows[static_cast<size_t>(rank)] = trained(rows[static_cast<size_t>(rank)], 1, rank);
        }
        const Tensor own = rows[static_cast<size_t>(group.rank())];
        require(is_close(model->mean, is_averaged ? mean_of(rows, 0, 2) : own), "the buffer");
        require(model->count.item<int64_t>() == group.rank(), "integers are those of the rank");
      });
    }
  }
}

// The constructor gives all ranks the values of rank 0.
TEST(ModelAverager, RanksBeginWithTheValuesOfRank0) {
  expect_on_ranks(3, [](const ProcessGroup& group) {
    const auto model = std::make_shared<Model>();
    {
      const torch::NoGradGuard no_grad;
      for (const Tensor& parameter : model->parameters()) parameter.fill_(1.0 + group.rank());
      model->mean.fill_(5.0 + group.rank());
    }
    const ModelAverager averager{model, group, {.method = DiLoCo{}}};
    for (const Tensor& parameter : model->parameters()) {
      require((parameter == 1).all().item<bool>(), "the parameters");
    }
    require((model->mean == 5).all().item<bool>(), "the buffers");
    require((averager.state()[1].second == 1).all().item<bool>(), "the synchronized weights");
  });
}

// An outer optimizer of the program, here Adam of libtorch.
TEST(ModelAverager, DiLoCoTakesAnyOuterOptimizer) {
  const Model initial;
  const Tensor leaf = initial.weight.detach().clone().requires_grad_(true);
  torch::optim::Adam adam({leaf}, torch::optim::AdamOptions(0.1));
  const Rows expected = train_rows(initial.weight, 2, [&](Rows& rows, int64_t step) {
    if (step % 2 != 0) return;
    leaf.mutable_grad() = leaf.detach() - mean_of(rows, 0, 2);
    adam.step();
    rows = repeated(leaf.detach(), 2);
  });
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    const auto model = std::make_shared<Model>();
    ModelAverager averager{
        model,
        group,
        {.method = DiLoCo{.period = 2, .make_optimizer = [](std::vector<Tensor> weights) {
                            return std::make_unique<torch::optim::Adam>(
                                std::move(weights), torch::optim::AdamOptions(0.1));
                          }}}};
    for (int64_t step = 1; step <= kNumSteps; ++step) {
      train(*model, step, group.rank());
      averager.step();
    }
    require(is_close(model->weight, expected[static_cast<size_t>(group.rank())]), "Adam");
  });
}

// 8 bits: each parameter has a scale of its own, so a parameter that changes little is not lost.
TEST(ModelAverager, DiLoCoExchangesIn8Bits) {
  expect_on_ranks(3, [](const ProcessGroup& group) {
    const auto model = std::make_shared<Model>();
    ModelAverager averager{model,
                           group,
                           {.method = DiLoCo{.period = 1,
                                             .learning_rate = 1,
                                             .momentum = 0,
                                             .exchange = comm_hooks::quantize_per_tensor()}}};
    const Tensor weight = model->weight.detach().clone();
    const Tensor turned = model->turned.detach().clone();
    const auto change = [&](double scale, int rank) {
      return torch::linspace(-1, 1 + rank, 6, torch::kDouble) * scale;
    };
    {
      const torch::NoGradGuard no_grad;
      model->weight.add_(change(1e-4, group.rank()).view({2, 3}));
      model->turned.add_(torch::linspace(0, 1e4, 8, torch::kDouble).view({2, 4}));
    }
    averager.step();
    Tensor expected = torch::zeros({6}, torch::kDouble);
    for (int rank = 0; rank < 3; ++rank) expected = expected + change(1e-4, rank) / 3;
    const Tensor found = (model->weight.detach() - weight).view({6});
    const double error = (found - expected).abs().max().item<double>() / 1e-4;
    // Half a step of 1/255 of the range 2 to 4, on each of three ranks, whose sum is divided by 3.
    require(error > 1e-6 && error < 1.0 / 128, format("error {}", error));
    require((model->turned.detach() - turned).max().item<double>() > 9.9e3, "the large one");
  });
}

// Returns the bytes that this rank gives to the collectives of kNumSteps steps, without what the
// ranks compare.
int64_t bytes_of(const ProcessGroup& world, const AveragingMethod& method) {
  testing::FakeGroup counted(world);
  const auto model = std::make_shared<Model>(torch::kFloat);
  ModelAverager averager{model, counted.group(), {.method = method}};
  std::atomic<int64_t> num_bytes = 0;
  counted.on_call = [&](testing::GroupCall& call) {
    // What is exchanged in 8 bits is one parameter, of 6 or 8 elements.
    const bool is_in_8_bits = call.input.scalar_type() == torch::kByte &&
                              (call.input.numel() == 6 || call.input.numel() == 8);
    if (call.is_of_values() || is_in_8_bits) num_bytes += static_cast<int64_t>(call.input.nbytes());
    call.pass_on();
  };
  for (int64_t step = 1; step <= kNumSteps; ++step) averager.step();
  return num_bytes;
}

TEST(ModelAverager, TheBytesSentAreThoseOfTheFormula) {
  // The tied weight counts once, and the frozen one does not.
  constexpr int64_t kNumel = 6 + 8;
  expect_on_ranks(2, [&](const ProcessGroup& group) {
    const auto expect = [&](const AveragingMethod& method, int64_t expected) {
      const int64_t sent = bytes_of(group, method);
      require(sent == expected, format("{} bytes, not {}", sent, expected));
    };
    expect(PeriodicAveraging{.period = 3}, 3 * 4 * kNumel);
    expect(PeriodicAveraging{.period = 3, .warmup_steps = 8}, 4 * kNumel);
    expect(DiLoCo{.period = 4}, 2 * 4 * kNumel);
    // Each of two parameters has a scale and a zero point of 8 bytes.
    expect(DiLoCo{.period = 4, .exchange = comm_hooks::quantize_per_tensor()},
           2 * (kNumel + 2 * 16));
  });
}

// A run that is stopped after step 4 and resumed gives the same bits, and other ones without the
// averager's state.
TEST(ModelAverager, AResumedRunGivesTheSameBits) {
  for (const AveragingMethod& method :
       {AveragingMethod(PeriodicAveraging{.period = 3, .warmup_steps = 1}),
        AveragingMethod(HierarchicalAveraging{.levels = {{2, 1}, {4, 2}}, .warmup_steps = 1}),
        AveragingMethod(DiLoCo{.period = 3}), AveragingMethod(Gossip{.period = 3})}) {
    expect_on_ranks(2, [&](const ProcessGroup& group) {
      const auto steps = [&](Model& model, ModelAverager& averager, int64_t from, int64_t to) {
        for (int64_t step = from; step <= to; ++step) {
          train(model, step, group.rank());
          averager.step();
        }
      };
      const auto first = std::make_shared<Model>();
      ModelAverager averager{first, group, {.method = method}};
      steps(*first, averager, 1, 4);
      const AveragerState state = averager.state();
      const Tensor weight = first->weight.detach().clone();
      steps(*first, averager, 5, kNumSteps);
      const auto resumed_from = [&](const AveragerState* loaded) {
        const auto model = std::make_shared<Model>();
        ModelAverager resumed{model, group, {.method = method}};
        {
          const torch::NoGradGuard no_grad;
          model->weight.copy_(weight);
        }
        if (loaded != nullptr) resumed.load_state(*loaded);
        steps(*model, resumed, 5, kNumSteps);
        return model->weight.detach().clone();
      };
      require(torch::equal(resumed_from(&state), first->weight.detach()), "the same bits");
      require(!torch::equal(resumed_from(nullptr), first->weight.detach()), "the state matters");
    });
  }
}

TEST(ModelAverager, StatesThatDoNotFitAreRefusedOnAllRanks) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto model = std::make_shared<Model>();
    ModelAverager averager{model, group, {.method = DiLoCo{.period = 1}}};
    train(*model, 1, group.rank());
    averager.step();
    const AveragerState good = averager.state();
    const auto refused = [&](const std::function<void(AveragerState&)>& damage,
                             const std::string& sentence) {
      for (const bool on_all : {true, false}) {
        AveragerState bad = good;
        if (on_all || group.rank() == 1) damage(bad);
        require_refused([&] { averager.load_state(bad); }, sentence);
      }
    };
    refused([](AveragerState& state) { state.pop_back(); }, "outer_optimizer");
    refused([](AveragerState& state) { state.clear(); }, "num_steps");
    refused([](AveragerState& state) { state[1].second = torch::ones({1}, torch::kDouble); },
            "has the sizes [1]");
    refused([](AveragerState& state) { state[1].second = Tensor(); }, "no tensor");
    refused([](AveragerState& state) { state[0].second = torch::tensor(int64_t{-1}); }, "damaged");
    refused([](AveragerState& state) { state[0].second = torch::tensor(1.0); }, "dtype");
    refused([](AveragerState& state) { state.emplace_back("more", torch::ones({1})); }, "uses");
    for (const int64_t at : {0, 100, 1000}) {
      refused(
          [at](AveragerState& state) {
            state.back().second = state.back().second.narrow(0, 0, at);
          },
          "archive");
    }
    // Other steps on one rank.
    AveragerState other = good;
    other[0].second = torch::tensor(int64_t{1 + group.rank()});
    require_refused([&] { averager.load_state(other); }, "num_steps is 1 on rank 0 and 2 on rank");
    // Nothing has changed.
    require(averager.num_steps() == 1, "the steps");
    const AveragerState now = averager.state();
    for (size_t i = 0; i < good.size(); ++i) {
      require(torch::equal(now[i].second, good[i].second), good[i].first);
    }
  });
}

TEST(ModelAverager, OptionsWithoutAMeaningAreRefused) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto refused = [&](const AveragingMethod& method, const std::string& sentence) {
      const auto model = std::make_shared<Model>();
      require_refused([&] { const ModelAverager averager(model, group, {.method = method}); },
                      sentence);
      // One rank alone has it: the same error on all.
      const AveragingMethod own = group.rank() == 1 ? method : PeriodicAveraging{};
      require_refused([&] { const ModelAverager averager(model, group, {.method = own}); }, "rank");
    };
    refused(PeriodicAveraging{.period = 0}, "the period is 0");
    refused(PeriodicAveraging{.period = 2, .warmup_steps = -1}, "warmup_steps is -1");
    refused(DiLoCo{.period = -3}, "the period is -3");
    refused(DiLoCo{.learning_rate = 0}, "learning_rate is 0");
    refused(DiLoCo{.momentum = 1}, "momentum is 1");
    refused(DiLoCo{.learning_rate = std::nan("")}, "learning_rate is nan");
    refused(Gossip{.period = 0}, "the period is 0");
    refused(HierarchicalAveraging{}, "group_size 0");
    refused(HierarchicalAveraging{.levels = {{1, 1}}}, "the last level has group_size 1");
    refused(HierarchicalAveraging{.levels = {{2, 3}}}, "divisor");
    refused(HierarchicalAveraging{.levels = {{2, 1}, {3, 2}}}, "larger multiples");
    refused(HierarchicalAveraging{.levels = {{2, 2}, {4, 2}}}, "larger multiples");
    // Ranks with different options, each of which has a meaning.
    const auto model = std::make_shared<Model>();
    require_refused(
        [&] {
          const ModelAverager averager(model, group,
                                       {.method = PeriodicAveraging{.period = 1 + group.rank()}});
        },
        "method is PeriodicAveraging with period 1");
    require_refused(
        [&] {
          const ModelAverager averager(
              model, group,
              {.method = PeriodicAveraging{.period = 2, .warmup_steps = group.rank()}});
        },
        "warmup_steps 0 on rank 0");
    require_refused(
        [&] { const ModelAverager averager(model, group, {.average_buffers = group.rank() == 0}); },
        "average_buffers is true on rank 0");
  });
}

TEST(ModelAverager, ModulesThatCannotBeAveragedAreRefused) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto refused = [&](const std::shared_ptr<nn::Module>& module,
                             const std::string& sentence) {
      require_refused([&] { const ModelAverager averager(module, group); }, sentence);
    };
    refused(nullptr, "the module is null");
    refused(group.rank() == 1 ? nullptr : std::make_shared<Model>(), "the module is null");
    refused(std::make_shared<nn::Module>(), "nothing to average");
    const auto complex = std::make_shared<nn::Module>();
    complex->register_parameter("phase", torch::ones({2}, torch::kComplexFloat));
    refused(complex, "\"phase\" is ComplexFloat");
    const auto other = std::make_shared<Model>();
    if (group.rank() == 1) other->register_parameter("extra", torch::ones({2}));
    refused(other, "extra");
    const auto frozen = std::make_shared<Model>();
    if (group.rank() == 1) frozen->turned.requires_grad_(false);
    refused(frozen, "turned");
    nn::Linear sharded(4, 4);
    FullyShardedDataParallel wrapper{sharded, group};
    refused(sharded.ptr(), "Averaging needs whole models");
    // The group is usable.
    const Tensor sum = torch::ones({1});
    group.all_reduce(sum);
    require(sum.item<float>() == 2, "the group works");
  });
}

// A program that changes its module, or a rank that has made more steps, gets an error on all
// ranks, before a parameter has changed.
TEST(ModelAverager, ChangesBehindTheAveragerAreErrorsOnAllRanks) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto replaced = std::make_shared<Model>();
    ModelAverager averager{replaced, group};
    averager.step();
    replaced->turned.requires_grad_(false);  // freezing is allowed, also on one rank
    averager.step();
    if (group.rank() == 1) replaced->frozen.requires_grad_(true);
    train(*replaced, 1, group.rank());
    const Tensor before = replaced->weight.detach().clone();
    const std::string failure = failure_of([&] { averager.step(); });
    require(failure.find("frozen") != std::string::npos, failure);
    require(torch::equal(replaced->weight.detach(), before), "nothing has changed");
    require(averager.num_steps() == 2, "no step");
    replaced->frozen.requires_grad_(false);
    averager.step();
    require(!torch::equal(replaced->weight.detach(), before), "it works again");

    const auto model = std::make_shared<Model>();
    ModelAverager uneven{model, group, {.method = PeriodicAveraging{.period = 2}}};
    uneven.step();
    if (group.rank() == 1) uneven.step();  // step 2 does not average
    const std::string in_other_steps = failure_of([&] { uneven.synchronize(); });
    require(in_other_steps.find("rank 1 is in step 2 and rank 0 in step 1") != std::string::npos,
            in_other_steps);
  });
}

// Outer optimizers that differ train different models, which the next exchange notices.
TEST(ModelAverager, OuterOptimizersThatDifferAreNamed) {
  expect_on_ranks(3, [](const ProcessGroup& group) {
    const auto model = std::make_shared<Model>();
    const double rate = group.rank() == 2 ? 0.2 : 0.1;
    ModelAverager averager{
        model, group, {.method = DiLoCo{.period = 1, .make_optimizer = [rate](auto weights) {
                                          return std::make_unique<torch::optim::SGD>(
                                              std::move(weights), torch::optim::SGDOptions(rate));
                                        }}}};
    train(*model, 1, group.rank());
    averager.step();
    train(*model, 2, group.rank());
    const std::string failure = failure_of([&] { averager.step(); });
    require(failure.find("\"weight\" differ between rank 0 and rank 2") != std::string::npos,
            failure);
  });
}

// A rank that stops calling step() is named when the others have waited until the deadline.
TEST(ModelAverager, ARankThatDoesNotStepIsNamed) {
  std::promise<void> has_failed;
  const auto result =
      testing::run_groups(2,
                          [&](const ProcessGroup& group, std::string& output) {
                            const auto model = std::make_shared<Model>();
                            ModelAverager averager{model, group, {.method = Gossip{}}};
                            if (group.rank() == 1) return has_failed.get_future().wait();
                            output = failure_of([&] { averager.step(); });
                            has_failed.set_value();
                          },
                          {.timeout = std::chrono::seconds(1)});
  EXPECT_THAT(result.ranks[0].output, ::testing::HasSubstr("timed out"));
  EXPECT_THAT(result.ranks[0].output, ::testing::HasSubstr("rank 1"));
}

TEST(ModelAverager, AHookThatThrowsEndsTheExchangeOnAllRanks) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto hook = comm_hooks::custom(
        "bad", [](const GradBucket& bucket, const ProcessGroup& ranks) -> FinishReduction {
          if (ranks.rank() == 1 && bucket.index == 1) throw std::runtime_error("no memory");
          const auto work = std::make_shared<Work>(ranks.all_reduce_async(bucket.buffer));
          return [work] { work->wait(); };
        });
    const auto model = std::make_shared<Model>();
    ModelAverager averager{model, group, {.method = DiLoCo{.period = 1, .exchange = hook}}};
    train(*model, 1, group.rank());
    const Tensor before = model->weight.detach().clone();
    const std::string failure = failure_of([&] { averager.step(); });
    require(failure.find("no memory") != std::string::npos, failure);
    require(failure.find("rank 1") != std::string::npos || group.rank() == 1, failure);
    require(torch::equal(model->weight.detach(), before), "nothing has changed");
  });
}

struct Thrower final : torch::optim::SGD {
  Thrower(std::vector<Tensor> weights, bool is_broken)
      : SGD(std::move(weights), torch::optim::SGDOptions(0.1)), throws(is_broken) {}
  Tensor step(LossClosure closure = nullptr) override {
    if (throws) throw std::runtime_error("no memory");
    return SGD::step(std::move(closure));
  }
  bool throws;
};

// The other rank has its result already, and learns of it in the next exchange.
TEST(ModelAverager, AnOuterOptimizerThatThrowsOnOneRankEndsTheGroup) {
  expect_on_ranks(2, [](const ProcessGroup& group) {
    const auto model = std::make_shared<Model>();
    ModelAverager averager{
        model, group, {.method = DiLoCo{.period = 1, .make_optimizer = [&](auto weights) {
                                          return std::make_unique<Thrower>(std::move(weights),
                                                                           group.rank() == 1);
                                        }}}};
    std::string failure;
    for (int i = 0; i < 2 && failure.empty(); ++i) failure = failure_of([&] { averager.step(); });
    require(failure.find("no memory") != std::string::npos, failure);
    require(failure.find("rank 1") != std::string::npos || group.rank() == 1, failure);
  });
}

}  // namespace
}  // namespace cadre::model_averaging
