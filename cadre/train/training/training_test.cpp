// Trains one program under every strategy and compares it with a loop of libtorch alone on the
// whole batch.
#include "cadre/train/training/training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/comm_hooks/comm_hooks.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/counting_dataset.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/training_course.h"
#include "cadre/testing/torch/wrap_net.h"
#include "cadre/train/checkpoint/optimizer_state.h"

namespace cadre::training_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::run_groups;
using testing::ScopedVariable;
using Course = testing::TrainingCourse;
namespace nn = torch::nn;
using torch::Tensor;

constexpr int kNumSteps = 20;
constexpr int64_t kWidth = 6;
constexpr int64_t kNumLayers = 4;

// A network of modules of libtorch only.
struct NetImpl : nn::Module {
  NetImpl() {
    torch::manual_seed(7);
    stem = register_module("stem", nn::Linear(kWidth, kWidth));
    encoder = register_module(
        "encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(
                       nn::TransformerEncoderLayerOptions(kWidth, 2).dim_feedforward(8).dropout(0),
                       kNumLayers)));
    head = register_module("head", nn::Linear(kWidth, 1));
  }
  // x: (rows, kWidth). Each row is a sequence of one token.
  Tensor forward(const Tensor& x) { return head(encoder(stem(x).unsqueeze(0)).squeeze(0)); }
  nn::Linear stem{nullptr};
  nn::TransformerEncoder encoder{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

// The batch of all ranks in a step. The attention of libtorch needs at least one row in each part.
std::pair<Tensor, Tensor> batch_of(int step) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
  const int64_t num_rows = 12 + 5 * (step % 4);
  const Tensor inputs = torch::rand({num_rows, kWidth}, generator);
  return {inputs, inputs.sum(1, true).sin() * 2};
}

std::pair<Tensor, Tensor> rows_of_rank(int step, const ProcessGroup& world) {
  return testing::rows_of(batch_of(step), world);
}

Tensor loss_of(const Tensor& output, const Tensor& target) {
  return torch::mse_loss(output, target);
}

torch::optim::AdamWOptions with_decay() {
  return torch::optim::AdamWOptions(3e-3).weight_decay(0.1);
}
torch::optim::AdamWOptions without_decay() {
  return torch::optim::AdamWOptions(3e-3).weight_decay(0);
}
bool is_vector(const WholeParameter& parameter) {
  return parameter.sizes.size() < 2;
}

// The truth: libtorch alone, in one process.
Course trained_by_libtorch(double max_norm) {
  Net net;
  std::vector<Tensor> matrices, vectors;
  for (const Tensor& parameter : net->parameters()) {
    (parameter.dim() < 2 ? vectors : matrices).push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<torch::optim::AdamWOptions>(with_decay()));
  groups.emplace_back(vectors, std::make_unique<torch::optim::AdamWOptions>(without_decay()));
  torch::optim::AdamW optimizer(groups, torch::optim::AdamWOptions(3e-3));
  Course course;
  for (int step = 0; step < kNumSteps; ++step) {
    const auto [inputs, targets] = batch_of(step);
    optimizer.zero_grad();
    const Tensor loss = loss_of(net->forward(inputs), targets);
    loss.backward();
    course.norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), max_norm));
    optimizer.step();
    course.losses.push_back(loss.item<double>());
  }
  for (const Tensor& parameter : net->parameters()) course.parameters.push_back(parameter.clone());
  return course;
}

constexpr double kMaxNorm = 0.5;

enum class Form { kOwnLoop, kStep };

using NetTraining = Training<NetImpl, torch::optim::AdamWOptions>;

NetTraining make_training(const std::shared_ptr<NetImpl>& net, const ProcessGroup& world,
                          std::optional<DataStrategy> strategy, int64_t num_parts = 1) {
  return {net,
          with_decay(),
          world,
          {.strategy = strategy, .num_parts = num_parts, .max_norm = kMaxNorm},
          {{.contains = is_vector, .options = without_decay()}}};
}

// The program of this test, which is the same for all strategies.
void train(NetTraining& training, const ProcessGroup& world, Form form, int first, int end,
           Course& course) {
  const auto rows_at = [&](int step) { return rows_of_rank(step, world); };
  testing::train_course(training, form == Form::kStep, first, end, rows_at, loss_of, course);
}

// Makes the modules of the ranks, all with the same values. Ranks are threads, and libtorch has one
// default generator.
std::vector<Net> make_nets(int num_ranks) {
  std::vector<Net> nets;
  for (int rank = 0; rank < num_ranks; ++rank) nets.emplace_back();
  return nets;
}

std::vector<Tensor> parameters_in(const SnapshotFolder& folder) {
  Net net;
  load_sharded(folder.latest().value(), parts_of(*net), {.with_optimizer = false});
  return net->parameters();
}

struct Case {
  const char* name;
  DataStrategy strategy;
  int num_ranks;
  Form form = Form::kOwnLoop;
  int64_t num_parts = 1;
};

class TrainingEquality : public ::testing::TestWithParam<Case> {};

TEST_P(TrainingEquality, EqualsALoopOfLibtorchOnTheWholeBatch) {
  const Case& given = GetParam();
  const Course truth = trained_by_libtorch(kMaxNorm);
  const testing::TemporaryFolder temporary;
  std::vector<Net> nets = make_nets(given.num_ranks);
  std::vector<Course> courses(nets.size());
  const auto result = run_groups(given.num_ranks, [&](const ProcessGroup& world) {
    const auto rank = static_cast<size_t>(world.rank());
    auto training = make_training(nets[rank].ptr(), world, given.strategy, given.num_parts);
    EXPECT_EQ(training.strategy(), given.strategy);
    train(training, world, given.form, 0, kNumSteps, courses[rank]);
    SnapshotFolder folder(temporary.path() / "run");
    training.save(folder, kNumSteps);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (Course& course : courses) {
    course.parameters = parameters_in(SnapshotFolder(temporary.path() / "run"));
    expect_near(course, truth);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, TrainingEquality,
    ::testing::Values(Case{"single", DataStrategy::kSingle, 1},
                      Case{"single_in_parts", DataStrategy::kSingle, 1, Form::kStep, 3},
                      Case{"ddp_1", DataStrategy::kDdp, 1}, Case{"ddp_3", DataStrategy::kDdp, 3},
                      Case{"ddp_4_in_parts", DataStrategy::kDdp, 4, Form::kStep, 3},
                      Case{"zero1_2", DataStrategy::kZero1, 2},
                      Case{"zero1_4_in_parts", DataStrategy::kZero1, 4, Form::kStep, 2},
                      Case{"zero2_3", DataStrategy::kZero2, 3},
                      Case{"zero2_2_in_parts", DataStrategy::kZero2, 2, Form::kStep, 3},
                      Case{"fsdp_1", DataStrategy::kFsdp, 1},
                      Case{"fsdp_4", DataStrategy::kFsdp, 4},
                      Case{"fsdp_3_in_parts", DataStrategy::kFsdp, 3, Form::kStep, 2},
                      Case{"hsdp_4", DataStrategy::kHsdp, 4},
                      Case{"hsdp_4_in_parts", DataStrategy::kHsdp, 4, Form::kStep, 3}),
    [](const auto& test) { return std::string(test.param.name); });

// Ranks without rows in some parts, or in all of them.
TEST(Training, SharesOfABatchMayBeEmpty) {
  const auto make_net = [] {
    torch::manual_seed(3);
    return nn::Sequential(nn::Linear(kWidth, 8), nn::Tanh(), nn::Linear(8, 1));
  };
  const auto rows = [](int step) {
    const auto [inputs, targets] = batch_of(step);
    return std::pair(inputs.slice(0, 0, 2), targets.slice(0, 0, 2));
  };
  std::vector<double> truth;
  nn::Sequential plain = make_net();
  torch::optim::AdamW optimizer(plain->parameters(), with_decay());
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const Tensor loss = loss_of(plain->forward(rows(step).first), rows(step).second);
    loss.backward();
    optimizer.step();
    truth.push_back(loss.item<double>());
  }
  for (const DataStrategy strategy :
       {DataStrategy::kDdp, DataStrategy::kZero1, DataStrategy::kZero2, DataStrategy::kFsdp}) {
    SCOPED_TRACE(std::string(to_string(strategy)));
    const std::vector<nn::Sequential> nets = {make_net(), make_net(), make_net()};
    const auto result = run_groups(3, [&](const ProcessGroup& world) {
      Training training{nets[static_cast<size_t>(world.rank())], with_decay(), world,
                        TrainingOptions{.strategy = strategy, .num_parts = 2}};
      for (int step = 0; step < 5; ++step) {
        const auto [inputs, targets] = rows(step);
        const int64_t begin = world.rank() == 2 ? 1 : 0;  // rank 1 has no rows
        const int64_t end = begin + (world.rank() == 1 ? 0 : 1);
        const StepResult own =
            training.step(inputs.slice(0, begin, end), targets.slice(0, begin, end), loss_of);
        EXPECT_NEAR(training.mean(own.loss), truth[static_cast<size_t>(step)], 1e-6);
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// A run that is saved under one strategy and loaded under another one, on other numbers of ranks,
// goes on as if nothing had happened.
TEST(Training, GoesOnUnderEveryOtherStrategy) {
  const Course truth = trained_by_libtorch(kMaxNorm);
  const std::vector<std::pair<DataStrategy, int>> stages = {
      {DataStrategy::kFsdp, 3}, {DataStrategy::kSingle, 1}, {DataStrategy::kZero2, 2},
      {DataStrategy::kHsdp, 4}, {DataStrategy::kZero1, 3},  {DataStrategy::kDdp, 2}};
  const testing::TemporaryFolder temporary;
  Course course;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    const auto [strategy, num_ranks] = stages[stage];
    const int first = kNumSteps * static_cast<int>(stage) / static_cast<int>(stages.size());
    const int end = kNumSteps * static_cast<int>(stage + 1) / static_cast<int>(stages.size());
    std::vector<Net> nets = make_nets(num_ranks);
    // Values that the load must replace.
    if (stage > 0)
      for (const Tensor& parameter : nets[0]->parameters()) parameter.data().fill_(9);
    const auto result = run_groups(num_ranks, [&](const ProcessGroup& world) {
      auto training = make_training(nets[static_cast<size_t>(world.rank())].ptr(), world, strategy);
      SnapshotFolder folder(temporary.path() / "run");
      if (stage > 0) {
        const LoadedSnapshot loaded = training.load(folder.latest().value());
        EXPECT_EQ(loaded.step, first);
        EXPECT_EQ(loaded.extra, R"({"seen":)" + std::to_string(first) + "}");
      }
      Course own;
      train(training, world, Form::kOwnLoop, first, end, own);
      training.save(folder, end, R"({"seen":)" + std::to_string(end) + "}");
      if (world.rank() != 0) return;
      course.losses.insert(course.losses.end(), own.losses.begin(), own.losses.end());
      course.norms.insert(course.norms.end(), own.norms.begin(), own.norms.end());
    });
    ASSERT_TRUE(result.ok()) << result.failures();
  }
  course.parameters = parameters_in(SnapshotFolder(temporary.path() / "run"));
  expect_near(course, truth);
}

int64_t numel_of(const std::vector<Tensor>& tensors) {
  int64_t numel = 0;
  for (const Tensor& tensor : tensors) numel += tensor.numel();
  return numel;
}

// What a rank of four holds, in elements.
struct Holding {
  int64_t parameters = 0;  // that its optimizer updates
  int64_t gradients = 0;   // of shards, after a backward
  int64_t moments = 0;     // the first moments of AdamW
  int64_t gathered = 0;    // at the peak, under fsdp and hsdp
};

Holding holding_of(NetTraining& training, const ProcessGroup& world) {
  const auto [inputs, targets] = rows_of_rank(3, world);
  training.backward(loss_of(training(inputs), targets));
  Holding held;
  for (const ParameterShard& shard : training.parameter_shards()) {
    if (shard.values.grad().defined()) held.gradients += shard.values.grad().numel();
  }
  training.step();
  const SnapshotParts parts = training.parts();
  for (const ParameterState& state :
       state_dict(training.local_optimizer(), parts.parameters, {.is_shared = true})) {
    for (const auto& [name, tensor] : state.tensors) {
      if (name == "exp_avg") held.moments += tensor.numel();
    }
  }
  for (const SnapshotTensor& part : parts.parameters) held.parameters += part.values.numel();
  training.with_wrapper([&](const auto& wrapper) {
    if constexpr (requires { wrapper.peak_full_bytes(); }) {
      held.gathered = wrapper.peak_full_bytes() / static_cast<int64_t>(sizeof(float));
    }
  });
  return held;
}

// Returns what the four ranks hold together, and at `gathered` what the first one has gathered.
Holding holding_under(DataStrategy strategy, const WrapPolicy& policy = {}) {
  std::vector<Net> nets = make_nets(4);
  std::vector<Holding> held(nets.size());
  const auto result = run_groups(4, [&](const ProcessGroup& world) {
    const auto rank = static_cast<size_t>(world.rank());
    NetTraining training(nets[rank].ptr(), with_decay(), world,
                         {.strategy = strategy, .fsdp = {.wrap_policy = policy}});
    held[rank] = holding_of(training, world);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  Holding all;
  for (const Holding& rank : held) {
    all.parameters += rank.parameters;
    all.gradients += rank.gradients;
    all.moments += rank.moments;
  }
  all.gathered = held[0].gathered;
  return all;
}

TEST(Training, EachRankHoldsWhatTheStrategySays) {
  const int64_t whole = numel_of(Net()->parameters());
  const Holding ddp = holding_under(DataStrategy::kDdp);
  EXPECT_EQ(ddp.parameters, 4 * whole);
  EXPECT_EQ(ddp.gradients, 0);
  EXPECT_EQ(ddp.moments, 4 * whole);
  for (const DataStrategy strategy :
       {DataStrategy::kZero1, DataStrategy::kZero2, DataStrategy::kFsdp, DataStrategy::kHsdp}) {
    SCOPED_TRACE(std::string(to_string(strategy)));
    const Holding held = holding_under(strategy);
    const int num_copies = strategy == DataStrategy::kHsdp ? 2 : 1;
    EXPECT_EQ(held.parameters, num_copies * whole);
    EXPECT_EQ(held.gradients, strategy == DataStrategy::kZero1 ? 0 : num_copies * whole);
    EXPECT_EQ(held.moments, num_copies * whole);
    if (!has_units(strategy)) continue;
    // Two of the four layers are gathered at a time, and not the whole model.
    const Holding in_one = holding_under(strategy, [](const WrapCandidate&) { return false; });
    EXPECT_LT(held.gathered, in_one.gathered * 3 / 4);
    EXPECT_GT(held.gathered, 0);
  }
}

std::string refusal(int num_ranks, const TrainingOptions& options) {
  std::vector<Net> nets = make_nets(num_ranks);
  std::vector<std::string> messages(nets.size());
  const auto result = run_groups(num_ranks, [&](const ProcessGroup& world) {
    const auto rank = static_cast<size_t>(world.rank());
    messages[rank] = error_of([&] { NetTraining(nets[rank].ptr(), with_decay(), world, options); },
                              ErrorCode::kInvalidArgument);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const std::string& message : messages) EXPECT_EQ(message, messages[0]);
  return messages[0];
}

TEST(Training, TakesTheStrategyOfTheEnvironment) {
  const auto strategy_of_two_ranks = [] {
    std::vector<Net> nets = make_nets(2);
    std::optional<DataStrategy> strategy;
    const auto result = run_groups(2, [&](const ProcessGroup& world) {
      const NetTraining training(nets[static_cast<size_t>(world.rank())].ptr(), with_decay(),
                                 world);
      if (world.rank() == 0) strategy = training.strategy();
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    return strategy;
  };
  EXPECT_EQ(strategy_of_two_ranks(), DataStrategy::kDdp);
  {
    const ScopedVariable chosen(kStrategyVariable, "fsdp");
    EXPECT_EQ(strategy_of_two_ranks(), DataStrategy::kFsdp);
  }
  const ScopedVariable chosen(kStrategyVariable, "zero3");
  EXPECT_THAT(refusal(2, {}),
              HasSubstr("CADRE_STRATEGY is \"zero3\", and \"zero3\" in it is none of single, ddp, "
                        "zero1, zero2, fsdp, hsdp, pipeline, context, tensor"));
}

TEST(Training, RefusesOptionsThatCannotBe) {
  EXPECT_THAT(refusal(2, {.strategy = DataStrategy::kSingle}),
              HasSubstr("the strategy is single, and there are 2 ranks"));
  EXPECT_THAT(refusal(3, {.strategy = DataStrategy::kHsdp}),
              HasSubstr("hsdp divides 3 ranks into 2 groups"));
  EXPECT_THAT(refusal(2, {.strategy = DataStrategy::kHsdp, .num_replicas = -1}),
              HasSubstr("hsdp divides 2 ranks into -1 groups"));
  EXPECT_THAT(refusal(1, {.num_parts = 0}), HasSubstr("options.num_parts is 0"));
  EXPECT_THAT(refusal(1, {.max_norm = 0.0}), HasSubstr("options.max_norm is 0"));
  EXPECT_THAT(refusal(2, {.autocast = torch::kDouble}), HasSubstr("options.autocast is Double"));
  EXPECT_THAT(refusal(2, {.fsdp = {.ignored = {"head"}}}),
              HasSubstr("options.fsdp.ignored names parameters that no optimizer"));
  EXPECT_THAT(refusal(2, {.strategy = DataStrategy::kFsdp,
                          .ddp = {.comm_hook = comm_hooks::bf16_compress()}}),
              HasSubstr("options.ddp.comm_hook is set, and fsdp reduces gradients without hooks"));
}

// torch::optim takes the default learning rate of a class for one that is not set.
TEST(Training, AGroupKeepsItsLearningRate) {
  const auto rates_of = [](const auto& base, const auto& other) {
    std::vector<double> rates;
    const auto result = run_groups(1, [&](const ProcessGroup& world) {
      Training training{Net(), base, world, {}, {{.contains = is_vector, .options = other}}};
      for (const auto& group : training.optimizer().param_groups()) {
        rates.push_back(group.options().get_lr());
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    return rates;
  };
  namespace optim = torch::optim;
  using ::testing::ElementsAre;
  EXPECT_THAT(rates_of(optim::AdamWOptions(0.5), optim::AdamWOptions(1e-3)),
              ElementsAre(1e-3, 0.5));
  EXPECT_THAT(rates_of(optim::AdamOptions(1e-3), optim::AdamOptions(0.5)), ElementsAre(0.5, 1e-3));
  EXPECT_THAT(rates_of(optim::SGDOptions(0.5), optim::SGDOptions(1e-3)), ElementsAre(1e-3, 0.5));
  EXPECT_THAT(rates_of(optim::AdagradOptions(0.5), optim::AdagradOptions(1e-2)),
              ElementsAre(1e-2, 0.5));
  EXPECT_THAT(rates_of(optim::RMSpropOptions(0.5), optim::RMSpropOptions(1e-2)),
              ElementsAre(1e-2, 0.5));
  EXPECT_THAT(rates_of(AdadeltaOptions(0.5), AdadeltaOptions(1.0)), ElementsAre(1.0, 0.5));
}

// The program does not change with the strategy, so parameters may be read at any time, on all
// ranks.
TEST(Training, ParametersMayBeReadAfterAStep) {
  for (const DataStrategy strategy :
       {DataStrategy::kDdp, DataStrategy::kZero1, DataStrategy::kZero2, DataStrategy::kFsdp}) {
    SCOPED_TRACE(std::string(to_string(strategy)));
    std::vector<Net> nets = make_nets(2);
    std::vector<double> sums(2);
    const auto result = run_groups(2, [&](const ProcessGroup& world) {
      const auto rank = static_cast<size_t>(world.rank());
      auto training = make_training(nets[rank].ptr(), world, strategy);
      const auto [inputs, targets] = rows_of_rank(1, world);
      training.step(inputs, targets, loss_of);
      sums[rank] = training->stem->weight.square().sum().item<double>();
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    EXPECT_EQ(sums[0], sums[1]);
  }
}

// The samples of a sequence-first input are its second dimension.
TEST(Training, TheProgramMayCountItsSamples) {
  std::vector<Net> nets = make_nets(2);
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    const auto rank = static_cast<size_t>(world.rank());
    auto training = make_training(nets[rank].ptr(), world, DataStrategy::kDdp);
    const auto [inputs, targets] = batch_of(1);
    training.set_num_samples(world.rank() == 0 ? 3 : 1);
    const double loss = world.rank() == 0 ? 4.0 : 8.0;
    const Tensor own = training(inputs).sum() * 0 + loss;
    EXPECT_DOUBLE_EQ(training.mean(own), 5.0);
    training.backward(own);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(Training, RefusesRanksWithDifferentOptions) {
  std::vector<Net> nets = make_nets(2);
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    const auto strategy = world.rank() == 0 ? DataStrategy::kFsdp : DataStrategy::kDdp;
    const std::string message = error_of(
        [&] { make_training(nets[static_cast<size_t>(world.rank())].ptr(), world, strategy); },
        ErrorCode::kInvalidArgument);
    EXPECT_THAT(message, HasSubstr("the strategy is fsdp on rank 0 and ddp on rank 1"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(Training, RefusesAPairOfTensorsWithDifferentRows) {
  const auto result = run_groups(1, [&](const ProcessGroup& world) {
    auto training = make_training(Net().ptr(), world, DataStrategy::kDdp);
    EXPECT_THAT(error_of(
                    [&] {
                      training.step(torch::ones({2, kWidth}), torch::ones({3}), loss_of);
                    },
                    ErrorCode::kInvalidArgument),
                HasSubstr("inputs have the sizes [2, 6] and targets [3]"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The model of defer_init() has values only in the Training.
TEST(Training, TakesADeferredModule) {
  const auto result = run_groups(1, [&](const ProcessGroup& world) {
    for (const DataStrategy strategy : {DataStrategy::kDdp, DataStrategy::kFsdp}) {
      const auto deferred = defer_init([] { return Net(); });
      auto training = make_training(deferred.ptr(), world, strategy);
      Net plain;
      torch::NoGradGuard no_grad;
      const Tensor inputs = batch_of(1).first;
      EXPECT_TRUE(training(inputs).equal(plain->forward(inputs)));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Autocast computes in bfloat16, and the results have the dtype of the loss.
TEST(Training, ComputesInTheDtypeOfAutocast) {
  const auto result = run_groups(1, [&](const ProcessGroup& world) {
    Net net;
    NetTraining training(net.ptr(), with_decay(), world, {.autocast = torch::kBFloat16});
    const Tensor inputs = batch_of(1).first;
    const Tensor output = training(inputs);
    EXPECT_EQ(output.scalar_type(), torch::kFloat);
    EXPECT_TRUE(output.equal(output.to(torch::kBFloat16).to(torch::kFloat)));
    EXPECT_FALSE(output.equal(net->forward(inputs)));
    training.backward(loss_of(output, batch_of(1).second));
    training.step();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(Training, DividesTheBatchesOfItsLoader) {
  std::vector<Net> nets = make_nets(3);
  std::vector<int64_t> num_rows(3);
  const auto result = run_groups(3, [&](const ProcessGroup& world) {
    const auto rank = static_cast<size_t>(world.rank());
    auto training = make_training(nets[rank].ptr(), world, DataStrategy::kFsdp);
    DataLoader loader = training.loader(testing::Counting(10), {.batch_size = 4});
    for (const Batch& batch : loader.epoch(0)) num_rows[rank] += batch.data.size(0);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(num_rows[0] + num_rows[1] + num_rows[2], 10);
  EXPECT_LT(num_rows[0], 6);
}

}  // namespace
}  // namespace cadre::training_test
