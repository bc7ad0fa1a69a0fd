// Trains one program with every degree of a model and compares it with a loop of libtorch alone on
// the whole batch.
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
#include "cadre/parallel/layers/counter_based_dropout.h"
#include "cadre/parallel/layers/linear.h"
#include "cadre/parallel/layers/transformer/transformer.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/counting_dataset.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/training_course.h"
#include "cadre/testing/torch/wrap_net.h"
#include "cadre/train/training/training.h"

namespace cadre::training_degrees_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::run_groups;
using testing::ScopedVariable;
using Course = testing::TrainingCourse;
namespace nn = torch::nn;
using torch::Tensor;

constexpr int kNumSteps = 8;
constexpr int64_t kNumTokens = 6;
constexpr int64_t kVocabulary = 11;
constexpr double kMaxNorm = 0.5;

// A decoder of Cadre's layers, whose head shares the table of the embedding if it is tied.
nn::Sequential make_decoder(bool is_tied = true) {
  torch::manual_seed(7);
  const TransformerOptions options{.vocabulary = kVocabulary,
                                   .context = kNumTokens,
                                   .embed_dim = 8,
                                   .num_heads = 2,
                                   .num_blocks = 2};
  TransformerEmbedding embedding(options);
  nn::Sequential decoder(embedding, TransformerBlock(options), TransformerBlock(options));
  if (is_tied) {
    decoder->push_back(TransformerHead(embedding));
  } else {
    decoder->push_back(TransformerHead(options));
  }
  return decoder;
}

// A network whose layers work on each token by itself, with a norm that has buffers.
nn::Sequential make_mlp() {
  torch::manual_seed(5);
  return nn::Sequential(Linear(nn::LinearOptions(kVocabulary, 8).bias(false)), nn::BatchNorm1d(8),
                        nn::Tanh(), Linear(8, 8), nn::Tanh(), Linear(8, kVocabulary));
}

// The batch of all ranks in a step: tokens, and the tokens that follow them.
std::pair<Tensor, Tensor> batch_of(int step) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
  const Tensor text =
      torch::randint(kVocabulary, {8 + 3 * (step % 3), kNumTokens + 1}, generator, torch::kLong);
  return {text.narrow(1, 0, kNumTokens), text.narrow(1, 1, kNumTokens)};
}

std::pair<Tensor, Tensor> rows_of(int step, const ProcessGroup& rows) {
  return testing::rows_of(batch_of(step), rows);
}

Tensor loss_of(const Tensor& logits, const Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

torch::optim::AdamWOptions with_decay() {
  return torch::optim::AdamWOptions(3e-3).weight_decay(0.1);
}

// The truth: libtorch alone, in one process.
Course trained_by_libtorch(bool is_tied) {
  nn::Sequential decoder = make_decoder(is_tied);
  torch::optim::AdamW optimizer(decoder->parameters(), with_decay());
  Course course;
  for (int step = 0; step < kNumSteps; ++step) {
    const auto [inputs, targets] = batch_of(step);
    optimizer.zero_grad();
    const Tensor loss = loss_of(decoder->forward(inputs), targets);
    loss.backward();
    course.norms.push_back(nn::utils::clip_grad_norm_(decoder->parameters(), kMaxNorm));
    optimizer.step();
    course.losses.push_back(loss.item<double>());
  }
  const torch::NoGradGuard no_grad;
  const auto [inputs, targets] = batch_of(kNumSteps);
  course.evaluation = loss_of(decoder->forward(inputs), targets).item<double>();
  for (const Tensor& parameter : decoder->parameters()) {
    course.parameters.push_back(parameter.clone());
  }
  return course;
}

using Decoder = Training<nn::SequentialImpl, torch::optim::AdamWOptions>;

// The program of this test, which is the same for all degrees.
void train(Decoder& training, bool by_step, int first, int end, Course& course) {
  const auto rows_at = [&](int step) { return rows_of(step, training.division().rows()); };
  testing::train_course(training, by_step, first, end, rows_at, loss_of, course);
}

// Ranks are threads, and libtorch has one default generator.
std::vector<nn::Sequential> make_decoders(int num_ranks, bool is_tied = true) {
  std::vector<nn::Sequential> decoders;
  for (int rank = 0; rank < num_ranks; ++rank) decoders.push_back(make_decoder(is_tied));
  return decoders;
}

// Returns the module of a rank, which then keeps its groups no longer than the rank.
nn::Sequential take(std::vector<nn::Sequential>& modules, const ProcessGroup& world) {
  return std::exchange(modules[static_cast<size_t>(world.rank())], nullptr);
}

std::vector<Tensor> parameters_in(const SnapshotFolder& folder, bool is_tied) {
  nn::Sequential decoder = make_decoder(is_tied);
  load_sharded(folder.latest().value(), parts_of(*decoder), {.with_optimizer = false});
  return decoder->parameters();
}

struct Case {
  const char* name;
  DataStrategy strategy;
  ModelDegrees degrees;
  int num_ranks;
  int64_t num_parts = 1;
  ContextForm form = ContextForm::kRing;
  const char* schedule = "1f1b";
};

class TrainingDegrees : public ::testing::TestWithParam<Case> {};

TEST_P(TrainingDegrees, EqualsALoopOfLibtorchOnTheWholeBatch) {
  const Case& given = GetParam();
  for (const bool is_tied : {true, false}) {
    SCOPED_TRACE(is_tied ? "tied" : "not tied");
    const Course truth = trained_by_libtorch(is_tied);
    const testing::TemporaryFolder temporary;
    std::vector<nn::Sequential> decoders = make_decoders(given.num_ranks, is_tied);
    std::vector<Course> courses(decoders.size());
    const auto result = run_groups(given.num_ranks, [&](const ProcessGroup& world) {
      const auto rank = static_cast<size_t>(world.rank());
      Decoder training(take(decoders, world).ptr(), with_decay(), world,
                       {.strategy = given.strategy,
                        .degrees = given.degrees,
                        .schedule = given.schedule,
                        .context_form = given.form,
                        .num_parts = given.num_parts,
                        .max_norm = kMaxNorm});
      EXPECT_EQ(training.division().degrees(), given.degrees);
      train(training, given.num_parts > 1, 0, kNumSteps, courses[rank]);
      const auto [inputs, targets] = rows_of(kNumSteps, training.division().rows());
      const Tensor evaluation = training.evaluate(inputs, targets, loss_of);
      EXPECT_FALSE(evaluation.requires_grad());
      courses[rank].evaluation = training.mean(evaluation);
      SnapshotFolder folder(temporary.path() / "run");
      training.save(folder, kNumSteps);
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    for (Course& course : courses) {
      course.parameters = parameters_in(SnapshotFolder(temporary.path() / "run"), is_tied);
      expect_near(course, truth);
    }
  }
}

constexpr auto kDdp = DataStrategy::kDdp;
std::vector<Case> cases() {
  return {Case{"tensor", kDdp, {.tensor = 2}, 2},
          Case{"ddp_tensor_in_parts", kDdp, {.tensor = 2}, 4, 3},
          Case{"zero1_tensor", DataStrategy::kZero1, {.tensor = 2}, 4},
          Case{"zero2_tensor", DataStrategy::kZero2, {.tensor = 2}, 4},
          Case{"fsdp_tensor", DataStrategy::kFsdp, {.tensor = 2}, 4},
          Case{"fsdp_tensor_in_parts", DataStrategy::kFsdp, {.tensor = 2}, 6, 2},
          Case{"hsdp_tensor", DataStrategy::kHsdp, {.tensor = 2}, 8},
          Case{"context", kDdp, {.context = 3}, 3},
          Case{"ddp_context_by_heads", kDdp, {.context = 2}, 4, 2, ContextForm::kAllToAll},
          Case{"zero1_context", DataStrategy::kZero1, {.context = 2}, 4},
          Case{"fsdp_context", DataStrategy::kFsdp, {.context = 2}, 4},
          Case{"ddp_context_tensor", kDdp, {.context = 2, .tensor = 2}, 8},
          Case{"fsdp_context_tensor", DataStrategy::kFsdp, {.context = 2, .tensor = 2}, 8, 2},
          Case{"pipeline", kDdp, {.pipeline = 2}, 2, 4},
          Case{"pipeline_of_3", kDdp, {.pipeline = 3}, 3, 3},
          Case{"ddp_pipeline", kDdp, {.pipeline = 2}, 4, 2},
          Case{"fsdp_pipeline", DataStrategy::kFsdp, {.pipeline = 2}, 4, 2},
          Case{"hsdp_pipeline", DataStrategy::kHsdp, {.pipeline = 2}, 8, 2},
          Case{"interleaved_pipeline",
               kDdp,
               {.pipeline = 2},
               2,
               4,
               ContextForm::kRing,
               "interleaved-1f1b"},
          Case{"pipeline_in_a_v", kDdp, {.pipeline = 2}, 2, 4, ContextForm::kRing, "zb-v"},
          Case{"pipeline_tensor", kDdp, {.pipeline = 2, .tensor = 2}, 4, 2},
          Case{"pipeline_context", kDdp, {.pipeline = 2, .context = 2}, 4, 2},
          Case{"fsdp_all", DataStrategy::kFsdp, {.pipeline = 2, .context = 2, .tensor = 2}, 8, 2}};
}
INSTANTIATE_TEST_SUITE_P(Cases, TrainingDegrees, ::testing::ValuesIn(cases()),
                         [](const auto& test) { return std::string(test.param.name); });

// A run that is saved with some degrees goes on with others as if nothing had happened.
TEST(TrainingDegrees, GoesOnWithEveryOtherDegree) {
  const Course truth = trained_by_libtorch(true);
  struct Stage {
    DataStrategy strategy;
    ModelDegrees degrees;
    int num_ranks;
  };
  const std::vector<Stage> stages = {{DataStrategy::kFsdp, {.tensor = 2}, 4},
                                     {kDdp, {.pipeline = 2}, 2},
                                     {DataStrategy::kZero1, {.context = 2}, 4},
                                     {DataStrategy::kFsdp, {.pipeline = 2}, 4}};
  const testing::TemporaryFolder temporary;
  Course course;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    const Stage& given = stages[stage];
    const int first = kNumSteps * static_cast<int>(stage) / static_cast<int>(stages.size());
    const int end = kNumSteps * static_cast<int>(stage + 1) / static_cast<int>(stages.size());
    std::vector<nn::Sequential> decoders = make_decoders(given.num_ranks);
    const auto result = run_groups(given.num_ranks, [&](const ProcessGroup& world) {
      Decoder training(take(decoders, world).ptr(), with_decay(), world,
                       {.strategy = given.strategy,
                        .degrees = given.degrees,
                        .schedule = given.strategy == kDdp ? "zb-v" : "1f1b",
                        .num_parts = 2,
                        .max_norm = kMaxNorm});
      SnapshotFolder folder(temporary.path() / "run");
      if (stage > 0) EXPECT_EQ(training.load(folder.latest().value()).step, first);
      Course own;
      train(training, true, first, end, own);
      training.save(folder, end);
      if (world.rank() != 0) return;
      course.losses.insert(course.losses.end(), own.losses.begin(), own.losses.end());
      course.norms.insert(course.norms.end(), own.norms.begin(), own.norms.end());
    });
    ASSERT_TRUE(result.ok()) << result.failures();
  }
  course.parameters = parameters_in(SnapshotFolder(temporary.path() / "run"), true);
  course.evaluation = truth.evaluation;
  expect_near(course, truth);
}

Tensor hot(const Tensor& tokens) {
  return nn::functional::one_hot(tokens, kVocabulary).to(torch::kFloat);
}

// A plain Sequential in two stages: buffers of both stages are in the snapshot, and a rank keeps
// the memory of its own layers only.
TEST(TrainingDegrees, APipelineHasTheBuffersOfAllStagesAndTheMemoryOfItsOwn) {
  std::vector<nn::Sequential> nets = {make_mlp(), make_mlp(), make_mlp()};
  nn::Sequential& plain = nets[2];
  const auto rows = [](int step) {
    const auto [inputs, targets] = batch_of(step);
    return std::pair(hot(inputs.select(1, 0)), targets.select(1, 0));
  };
  const auto loss = [](const Tensor& output, const Tensor& target) {
    return torch::cross_entropy_loss(output, target);
  };
  torch::optim::AdamW optimizer(plain->parameters(), with_decay());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    loss(plain->forward(rows(step).first), rows(step).second).backward();
    optimizer.step();
  }
  const testing::TemporaryFolder temporary;
  std::vector<std::vector<int64_t>> numels(2);
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    const auto rank = static_cast<size_t>(world.rank());
    Training training{take(nets, world), with_decay(), world,
                      TrainingOptions{.degrees = ModelDegrees{.pipeline = 2}}};
    for (int step = 0; step < 3; ++step) training.step(rows(step).first, rows(step).second, loss);
    for (const Tensor& parameter : training->parameters()) {
      numels[rank].push_back(parameter.numel());
    }
    SnapshotFolder folder(temporary.path() / "run");
    training.save(folder, 3);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(numels[0], (std::vector<int64_t>{88, 8, 8, 0, 0, 0, 0}));
  EXPECT_EQ(numels[1], (std::vector<int64_t>{0, 0, 0, 64, 8, 88, 11}));
  nn::Sequential loaded = make_mlp();
  load_sharded(SnapshotFolder(temporary.path() / "run").latest().value(), parts_of(*loaded),
               {.with_optimizer = false});
  for (size_t i = 0; i < plain->buffers().size(); ++i) {
    EXPECT_TRUE(torch::allclose(loaded->buffers()[i].to(torch::kDouble),
                                plain->buffers()[i].to(torch::kDouble), 1e-5, 1e-6))
        << "buffer " << i;
  }
}

// A pipeline starts from the values of rank 0, also in the layers that only other ranks keep.
TEST(TrainingDegrees, APipelineBeginsWithTheValuesOfRank0) {
  std::vector<nn::Sequential> decoders = make_decoders(3);
  for (const Tensor& parameter : decoders[1]->parameters()) parameter.data().fill_(3);
  const auto [inputs, targets] = batch_of(0);
  const double truth = loss_of(decoders[2]->forward(inputs), targets).item<double>();
  const auto result = run_groups(2, [&, x = inputs, y = targets](const ProcessGroup& world) {
    Decoder training(take(decoders, world).ptr(), with_decay(), world,
                     {.degrees = ModelDegrees{.pipeline = 2}});
    EXPECT_NEAR(training.evaluate(x, y, loss_of).item<double>(), truth, 1e-5);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Ranks with parts of the same rows get the same rows from the loader.
TEST(TrainingDegrees, TheLoaderDividesTheRowsAmongTheCopiesOfTheModel) {
  for (const ModelDegrees& degrees :
       {ModelDegrees{.tensor = 2}, ModelDegrees{.context = 2}, ModelDegrees{.pipeline = 2}}) {
    std::vector<nn::Sequential> decoders = make_decoders(4);
    std::vector<std::vector<int64_t>> rows(4);
    const auto result = run_groups(4, [&](const ProcessGroup& world) {
      const auto rank = static_cast<size_t>(world.rank());
      const Decoder training(take(decoders, world).ptr(), with_decay(), world,
                             {.degrees = degrees});
      DataLoader loader = training.loader(testing::Counting(8), {.batch_size = 4});
      for (const Batch& batch : loader.epoch(0)) {
        for (int64_t i = 0; i < batch.data.size(0); ++i) {
          rows[rank].push_back(batch.data[i].item<int64_t>());
        }
      }
    });
    ASSERT_TRUE(result.ok()) << result.failures();
    const size_t partner = degrees.pipeline > 1 ? 2 : 1;  // the other rank of rank 0's copy
    EXPECT_EQ(rows[0], rows[partner]);
    EXPECT_EQ(rows[3 - partner], rows[3]);
    EXPECT_EQ(rows[0].size() + rows[3].size(), 8);
    EXPECT_NE(rows[0], rows[3]);
  }
}

template <typename Make>
std::string refusal_of(int num_ranks, const Make& make_module, const TrainingOptions& options) {
  std::vector<nn::Sequential> modules;
  for (int rank = 0; rank < num_ranks; ++rank) modules.push_back(make_module());
  std::vector<std::string> messages(modules.size());
  const auto result = run_groups(num_ranks, [&](const ProcessGroup& world) {
    const auto rank = static_cast<size_t>(world.rank());
    messages[rank] =
        error_of([&] { Decoder(take(modules, world).ptr(), with_decay(), world, options); },
                 ErrorCode::kInvalidArgument);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const std::string& message : messages) EXPECT_EQ(message, messages[0]);
  return messages[0];
}

std::string refusal(int num_ranks, const TrainingOptions& options) {
  return refusal_of(
      num_ranks, [] { return make_decoder(); }, options);
}

TEST(TrainingDegrees, RefusesWhatCannotBe) {
  EXPECT_THAT(refusal(3, {.degrees = ModelDegrees{.tensor = 2}}),
              HasSubstr("tensor 2 is on 2 ranks, which do not divide 3 ranks"));
  EXPECT_THAT(refusal(2, {.degrees = ModelDegrees{.context = 0}}),
              HasSubstr("the degree 0 is not possible on 2 ranks"));
  EXPECT_THAT(refusal(2, {.degrees = ModelDegrees{.pipeline = 1 << 30, .context = 1 << 30}}),
              HasSubstr("the degree 1073741824 is not possible on 2 ranks"));
  const auto of_libtorch = [] {
    return nn::Sequential(nn::Embedding(kVocabulary, 8), nn::LayerNorm(nn::LayerNormOptions({8})),
                          nn::Linear(8, kVocabulary));
  };
  EXPECT_THAT(
      refusal_of(2, of_libtorch, {.degrees = ModelDegrees{.tensor = 2}}),
      HasSubstr("replace 0 by cadre::Embedding, 1 by cadre::LayerNorm, 2 by cadre::Linear"));
  EXPECT_THAT(
      refusal(2, {.degrees = ModelDegrees{.context = 2}, .weighting = GradientWeighting::kSum}),
      HasSubstr("the sum would count it several times"));
  EXPECT_THAT(refusal(2, {.strategy = DataStrategy::kHsdp, .degrees = ModelDegrees{.tensor = 2}}),
              HasSubstr("divides the ranks, which are those of different copies of the model"));
  const ModelDegrees pipeline{.pipeline = 2};
  EXPECT_THAT(refusal(4, {.strategy = DataStrategy::kZero1, .degrees = pipeline}),
              HasSubstr("zero1 divides no pipeline; choose ddp, fsdp or hsdp"));
  EXPECT_THAT(refusal(2, {.degrees = pipeline, .autocast = torch::kBFloat16}),
              HasSubstr("its stages run without autocast"));
  EXPECT_THAT(refusal(2, {.degrees = pipeline, .weighting = GradientWeighting::kSum}),
              HasSubstr("it weights gradients by samples"));
  EXPECT_THAT(refusal(2, {.degrees = pipeline, .ddp = {.comm_hook = comm_hooks::bf16_compress()}}),
              HasSubstr("it reduces gradients without hooks"));
  EXPECT_THAT(
      refusal(2, {.degrees = pipeline, .fsdp = {.precision = {.parameters = torch::kBFloat16}}}),
      HasSubstr("its stages are the units of fsdp and hsdp"));
  EXPECT_THAT(refusal(2, {.degrees = pipeline, .schedule = "2f2b"}), HasSubstr("2f2b"));
  EXPECT_THAT(refusal(5, {.degrees = ModelDegrees{.pipeline = 5}}), HasSubstr("4 layers"));
}

struct NetImpl : nn::Module {
  NetImpl() { head = register_module("head", Linear(kVocabulary, 4)); }
  Tensor forward(const Tensor& x) { return head(x); }
  Linear head{nullptr};
};
TORCH_MODULE(Net);

TEST(TrainingDegrees, APipelineNeedsASequential) {
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    EXPECT_THAT(error_of(
                    [&] {
                      Training(Net(), with_decay(), world,
                               TrainingOptions{.degrees = ModelDegrees{.pipeline = 2}});
                    },
                    ErrorCode::kInvalidArgument),
                HasSubstr("make it a torch::nn::Sequential of its layers"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(TrainingDegrees, APipelineHasNoForwardOfItsOwn) {
  std::vector<nn::Sequential> decoders = make_decoders(2);
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    Decoder training(take(decoders, world).ptr(), with_decay(), world,
                     {.degrees = ModelDegrees{.pipeline = 2}});
    EXPECT_THAT(error_of([&] { training.forward(batch_of(0).first); }, ErrorCode::kInvalidArgument),
                HasSubstr("use step(inputs, targets, loss)"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Each rank would have other columns without gather_output, and the loss of each would be wrong.
TEST(TrainingDegrees, RefusesOutputsThatAreDivided) {
  std::vector<Net> nets = {Net(), Net()};
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    for (const bool gathers : {false, true}) {
      Net net;
      Training training{net, with_decay(), world,
                        TrainingOptions{.degrees = ModelDegrees{.tensor = 2},
                                        .plan = {{"head", ParallelStyle::kColwise, gathers}}}};
      const Tensor inputs = hot(batch_of(0).first.select(1, 0));
      if (gathers) {
        EXPECT_EQ(training(inputs).size(1), 4);
        continue;
      }
      EXPECT_NE(error_of([&] { training(inputs); }, ErrorCode::kInvalidArgument), "");
      EXPECT_THAT(error_of([&] { training(inputs); }, ErrorCode::kInvalidArgument),
                  HasSubstr("give the layer that makes the outputs .gather_output = true"));
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The stages of a pipeline, or the parts of a sequence, would silently be of different samples.
TEST(TrainingDegrees, RefusesDifferentRowsOnTheRanksOfACopy) {
  for (const ModelDegrees& degrees :
       {ModelDegrees{.tensor = 2}, ModelDegrees{.context = 2}, ModelDegrees{.pipeline = 2}}) {
    std::vector<nn::Sequential> decoders = make_decoders(2);
    const auto result = run_groups(2, [&](const ProcessGroup& world) {
      Decoder training(take(decoders, world).ptr(), with_decay(), world, {.degrees = degrees});
      const auto [inputs, targets] = rows_of(0, world);
      for (int attempt = 0; attempt < 2; ++attempt) {
        EXPECT_THAT(error_of([&, x = inputs, y = targets] { training.step(x, y, loss_of); },
                             ErrorCode::kInvalidArgument),
                    HasSubstr("the ranks 0 and 1 of 2 that have one copy of the model together "
                              "got different rows"));
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// A dropout of libtorch draws on each rank.
TEST(TrainingDegrees, RefusesRandomNumbersOfEachRank) {
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    nn::Sequential net(Linear(kVocabulary, 64), nn::Dropout(0.5));
    Training training{net, with_decay(), world,
                      TrainingOptions{.degrees = ModelDegrees{.tensor = 2},
                                      .plan = {{"0", ParallelStyle::kColwise, true}}}};
    const Tensor inputs = hot(batch_of(0).first.select(1, 0));
    training.eval();
    training.forward(inputs);
    training.train();
    EXPECT_THAT(error_of([&] { training.forward(inputs); }, ErrorCode::kInvalidArgument),
                HasSubstr("use cadre::CounterBasedDropout"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The inputs and results of a model that divides tokens have tokens in their second dimension.
TEST(TrainingDegrees, RefusesTensorsWithoutTokens) {
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    CounterBasedDropout dropout(
        CounterBasedDropoutOptions{.p = 0, .stream = std::make_shared<DropoutStream>()});
    nn::Sequential net(Linear(4, 4), dropout, nn::Flatten());
    Training training{net, with_decay(), world,
                      TrainingOptions{.degrees = ModelDegrees{.context = 2}}};
    EXPECT_THAT(error_of(
                    [&] {
                      training.forward(torch::ones({3, 4, 4}).requires_grad_());
                    },
                    ErrorCode::kInvalidArgument),
                HasSubstr("an argument of the forward requires grad"));
    EXPECT_THAT(error_of([&] { training.forward(torch::ones({4})); }, ErrorCode::kInvalidArgument),
                HasSubstr("an argument of the forward has the sizes [4]"));
    EXPECT_THAT(error_of(
                    [&] {
                      training.forward(torch::ones({3, 4, 4}));
                    },
                    ErrorCode::kInvalidArgument),
                HasSubstr("the forward returned a tensor with the sizes [3, 8]"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Two layers that a plan divides, between others that every rank has whole.
struct WideImpl : nn::Module {
  WideImpl(double dropout_before, double dropout_after)
      : before(dropout_before), after(dropout_after) {
    torch::manual_seed(3);
    first = register_module("first", Linear(kVocabulary, 64));
    up = register_module("up", Linear(64, 64));
    down = register_module("down", Linear(64, 64));
    last = register_module("last", Linear(64, 4));
  }
  Tensor forward(const Tensor& x) {
    const Tensor hidden = torch::dropout(first(x), before, is_training());
    return last(torch::dropout(down(up(hidden).tanh()), after, is_training()));
  }
  double before, after;
  Linear first{nullptr}, up{nullptr}, down{nullptr}, last{nullptr};
};
TORCH_MODULE(Wide);

const std::vector<PlanEntry> kWidePlan = {{"up", ParallelStyle::kColwise},
                                          {"down", ParallelStyle::kRowwise}};

Tensor sum_of_squares(const Tensor& output, const Tensor& target) {
  return (output - target).square().sum(1).mean();
}

// Calls use(training, world, inputs, targets) on two ranks that divide a Wide.
template <typename Use>
void with_wide(double dropout_before, double dropout_after, const Use& use) {
  std::vector<Wide> modules;
  for (int rank = 0; rank < 2; ++rank) modules.emplace_back(dropout_before, dropout_after);
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    const Wide module = std::exchange(modules[static_cast<size_t>(world.rank())], nullptr);
    Training training{module, with_decay(), world,
                      TrainingOptions{.degrees = ModelDegrees{.tensor = 2}, .plan = kWidePlan}};
    use(training, world, torch::ones({128, kVocabulary}), torch::zeros({128, 4}));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The outputs of the first forward are equal, because they follow from a sum over the ranks; the
// weights before the dropout drift apart.
TEST(TrainingDegrees, RefusesMasksThatDriftWeightsApart) {
  with_wide(0.5, 0,
            [](auto& training, const ProcessGroup& /*world*/, const Tensor& inputs,
               const Tensor& targets) {
              EXPECT_THAT(error_of(
                              [&] {
                                for (int step = 0; step < 3; ++step) {
                                  training.step(inputs, targets, sum_of_squares);
                                }
                              },
                              ErrorCode::kInvalidArgument),
                          HasSubstr("use cadre::CounterBasedDropout"));
            });
  with_wide(0, 0.1,
            [](auto& training, const ProcessGroup& /*world*/, const Tensor& inputs,
               const Tensor& /*targets*/) {
              EXPECT_THAT(error_of([&] { training(inputs); }, ErrorCode::kInvalidArgument),
                          HasSubstr("the outputs of the module differ"));
            });
}

TEST(TrainingDegrees, RefusesBatchesThatDifferInOneElement) {
  for (const bool in_targets : {false, true}) {
    with_wide(0, 0,
              [&](auto& training, const ProcessGroup& world, const Tensor& inputs,
                  const Tensor& targets) {
                const Tensor own_inputs = inputs.clone();
                const Tensor own_targets = targets.clone();
                (in_targets ? own_targets : own_inputs)[7][2] += 1e-3 * world.rank();
                EXPECT_THAT(
                    error_of([&] { training.step(own_inputs, own_targets, sum_of_squares); },
                             ErrorCode::kInvalidArgument),
                    HasSubstr("got different rows"));
              });
  }
}

// The own loop does not show its targets; the gradients of whole parameters differ.
TEST(TrainingDegrees, RefusesTargetsThatDriftWeightsApart) {
  with_wide(
      0, 0,
      [](auto& training, const ProcessGroup& world, const Tensor& inputs, const Tensor& targets) {
        EXPECT_THAT(error_of(
                        [&] {
                          for (int step = 0; step < 3; ++step) {
                            training.backward(
                                sum_of_squares(training(inputs), targets + 1.0 + world.rank()));
                            training.step();
                          }
                        },
                        ErrorCode::kInvalidArgument),
                    HasSubstr("or the ranks had different targets"));
      });
}

TEST(TrainingDegrees, RefusesDifferentOptionsOfTheOptimizersInAStep) {
  for (const ModelDegrees& degrees : {ModelDegrees{.tensor = 2}, ModelDegrees{.pipeline = 2}}) {
    std::vector<nn::Sequential> decoders = make_decoders(2);
    const auto result = run_groups(2, [&](const ProcessGroup& world) {
      Decoder training(take(decoders, world).ptr(), with_decay(), world, {.degrees = degrees});
      const auto [inputs, targets] = batch_of(0);
      training.step(inputs, targets, loss_of);
      for (auto& group : training.optimizer().param_groups()) {
        group.options().set_lr(world.rank() == 0 ? 1e-3 : 2e-3);
      }
      EXPECT_THAT(error_of([&, x = inputs, y = targets] { training.step(x, y, loss_of); },
                           ErrorCode::kInvalidArgument),
                  HasSubstr("lr 0.001"));
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// Ranks 0 and 1 have one copy, ranks 2 and 3 the other one.
TEST(TrainingDegrees, RefusesDifferentModulesOnAllRanksOfAllCopies) {
  std::vector<Net> nets = {Net(), Net(), Net(), Net()};
  nets[3]->head = nets[3]->replace_module("head", Linear(kVocabulary, 6));
  std::vector<std::string> messages(4);
  const auto result = run_groups(4, [&](const ProcessGroup& world) {
    const auto rank = static_cast<size_t>(world.rank());
    messages[rank] = error_of(
        [&] {
          Training(nets[rank], with_decay(), world,
                   TrainingOptions{.degrees = ModelDegrees{.tensor = 2},
                                   .plan = {{"head", ParallelStyle::kColwise, true}}});
        },
        ErrorCode::kInvalidArgument);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  for (const std::string& message : messages) {
    EXPECT_THAT(message, HasSubstr("pass the same module and plan on all ranks"));
  }
}

// A frozen layer, and one that is used later, have no state in a snapshot before they train.
TEST(TrainingDegrees, APipelineSavesOnlyTheStatesThatThereAre) {
  std::vector<nn::Sequential> nets = {make_mlp(), make_mlp()};
  for (const nn::Sequential& net : nets) {
    for (const Tensor& parameter : net->ptr(5)->parameters()) parameter.requires_grad_(false);
  }
  const testing::TemporaryFolder temporary;
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    Training training{take(nets, world), with_decay(), world,
                      TrainingOptions{.degrees = ModelDegrees{.pipeline = 2}, .num_parts = 2}};
    const auto [inputs, targets] = batch_of(0);
    const Tensor x = hot(inputs.select(1, 0));
    const Tensor y = targets.select(1, 0);
    const auto loss = [](const Tensor& output, const Tensor& target) {
      return torch::cross_entropy_loss(output, target);
    };
    training.step(x, y, loss);
    SnapshotFolder folder(temporary.path() / "run");
    training.save(folder, 1);
    EXPECT_EQ(training.load(folder.latest().value()).step, 1);
    training.step(x, y, loss);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(TrainingDegrees, APipelineNeedsARowForEachMicrobatch) {
  std::vector<nn::Sequential> decoders = make_decoders(4);
  const auto result = run_groups(4, [&](const ProcessGroup& world) {
    Decoder training(take(decoders, world).ptr(), with_decay(), world,
                     {.degrees = ModelDegrees{.pipeline = 2}, .num_parts = 4});
    const auto [inputs, targets] = batch_of(0);
    const int64_t num_rows = training.division().rows().rank() == 0 ? 8 : 3;
    const Tensor x = inputs.narrow(0, 0, num_rows), y = targets.narrow(0, 0, num_rows);
    for (const bool is_step : {true, false}) {
      EXPECT_THAT(error_of(
                      [&] {
                        is_step ? training.step(x, y, loss_of).loss
                                : training.evaluate(x, y, loss_of);
                      },
                      ErrorCode::kInvalidArgument),
                  HasSubstr("this rank has 3 rows of the batch, and options.num_parts is 4"));
    }
    training.step(inputs, targets, loss_of);  // the group is usable
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The layers of other stages have no memory, and their buffers are in the snapshot.
TEST(TrainingDegrees, TakesADeferredModule) {
  const testing::TemporaryFolder temporary;
  std::vector<nn::Sequential> nets;
  for (int i = 0; i < 4; ++i) nets.push_back(defer_init([] { return make_mlp(); }));
  const Tensor inputs = hot(batch_of(0).first.select(1, 0));
  const Tensor targets = batch_of(0).second.select(1, 0);
  const auto loss = [](const Tensor& output, const Tensor& target) {
    return torch::cross_entropy_loss(output, target);
  };
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    Training training{take(nets, world), with_decay(), world,
                      TrainingOptions{.degrees = ModelDegrees{.pipeline = 2}}};
    training.step(inputs, targets, loss);
    SnapshotFolder folder(temporary.path() / "run");
    training.save(folder, 1);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  nn::Sequential plain = make_mlp();
  plain->forward(inputs);
  nn::Sequential loaded = make_mlp();
  load_sharded(SnapshotFolder(temporary.path() / "run").latest().value(), parts_of(*loaded),
               {.with_optimizer = false});
  EXPECT_TRUE(torch::allclose(loaded->buffers()[0], plain->buffers()[0], 1e-5, 1e-6));
  std::vector<nn::Sequential> divided = {nets[2], nets[3]};
  nets.clear();
  const auto by_tensor = run_groups(2, [&](const ProcessGroup& world) {
    Training training{take(divided, world), with_decay(), world,
                      TrainingOptions{.degrees = ModelDegrees{.tensor = 2},
                                      .plan = {{"5", ParallelStyle::kColwise, true}}}};
    training.step(inputs, targets, loss);
  });
  EXPECT_TRUE(by_tensor.ok()) << by_tensor.failures();
}

// Returns the first buffer on each of four ranks, which have two copies of two stages, after steps.
std::vector<Tensor> means_of_copies(bool broadcast_buffers) {
  std::vector<nn::Sequential> nets = {make_mlp(), make_mlp(), make_mlp(), make_mlp()};
  std::vector<Tensor> means(4);
  const auto result = run_groups(4, [&](const ProcessGroup& world) {
    Training training{take(nets, world), with_decay(), world,
                      TrainingOptions{.degrees = ModelDegrees{.pipeline = 2},
                                      .ddp = {.broadcast_buffers = broadcast_buffers}}};
    const auto loss = [](const Tensor& output, const Tensor& target) {
      return torch::cross_entropy_loss(output, target);
    };
    for (int step = 0; step < 2; ++step) {
      const auto [inputs, targets] = rows_of(step, training.division().rows());
      training.step(hot(inputs.select(1, 0)), targets.select(1, 0), loss);
    }
    static_cast<void>(training.parts());
    means[static_cast<size_t>(world.rank())] = training->buffers()[0].clone();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return means;
}

// The copies of a stage have the running statistics of the first one, as under ddp.
TEST(TrainingDegrees, TheCopiesOfAPipelineHaveEqualBuffers) {
  const std::vector<Tensor> means = means_of_copies(true);
  for (const Tensor& mean : means) EXPECT_TRUE(mean.equal(means[0]));
  EXPECT_GT(means[0].abs().sum().item<double>(), 0);
  const std::vector<Tensor> own = means_of_copies(false);  // ranks 0 and 1 have the layer
  EXPECT_FALSE(own[0].equal(own[1]));
}

// A layer that a model uses twice is in its snapshot once, as in one of the plain model.
TEST(TrainingDegrees, APipelineSavesASharedBufferOnce) {
  const auto make_net = [] {
    const nn::BatchNorm1d norm(8);
    return nn::Sequential(Linear(kVocabulary, 8), norm, norm, Linear(8, 4));
  };
  std::vector<nn::Sequential> nets = {make_net(), make_net()};
  const testing::TemporaryFolder temporary;
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    Training training{take(nets, world), with_decay(), world,
                      TrainingOptions{.degrees = ModelDegrees{.pipeline = 2}, .schedule = "1f1b"}};
    const Tensor inputs = hot(batch_of(0).first.select(1, 0));
    training.step(inputs, torch::zeros({inputs.size(0), 4}), sum_of_squares);
    SnapshotFolder folder(temporary.path() / "run");
    training.save(folder, 1);
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  nn::Sequential loaded = make_net();
  load_sharded(SnapshotFolder(temporary.path() / "run").latest().value(), parts_of(*loaded),
               {.with_optimizer = false});
  EXPECT_GT(loaded->buffers()[0].abs().sum().item<double>(), 0);
}

// An evaluation of different rows on the stages would pair inputs with foreign targets.
TEST(TrainingDegrees, AnEvaluationComparesTheRowsOfACopy) {
  std::vector<nn::Sequential> decoders = make_decoders(2);
  const auto result = run_groups(2, [&](const ProcessGroup& world) {
    Decoder training(take(decoders, world).ptr(), with_decay(), world,
                     {.degrees = ModelDegrees{.tensor = 2}});
    const auto [inputs, targets] = batch_of(0);
    const Tensor own = (targets + world.rank()).remainder(kVocabulary);
    EXPECT_THAT(error_of([&, x = inputs] { training.evaluate(x, own, loss_of); },
                         ErrorCode::kInvalidArgument),
                HasSubstr("got different rows"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Dropout drops the same elements, however the rows are divided into parts.
TEST(TrainingDegrees, TheProgramSetsTheRowsOfAPart) {
  std::vector<double> losses;
  for (const int num_parts : {1, 3}) {
    for (const int num_stages : {1, 2}) {
      std::vector<nn::Sequential> nets;
      std::vector<std::shared_ptr<DropoutStream>> streams;
      for (int rank = 0; rank < num_stages; ++rank) {
        torch::manual_seed(4);
        streams.push_back(std::make_shared<DropoutStream>());
        CounterBasedDropout dropout(CounterBasedDropoutOptions{.p = 0.5, .stream = streams.back()});
        nets.emplace_back(Linear(kVocabulary, 16), dropout, Linear(16, 4));
      }
      double loss = 0;
      const auto result = run_groups(num_stages, [&](const ProcessGroup& world) {
        const auto stream = streams[static_cast<size_t>(world.rank())];
        Training training{take(nets, world), with_decay(), world,
                          TrainingOptions{.degrees = ModelDegrees{.pipeline = num_stages},
                                          .num_parts = num_parts,
                                          .before_part = [stream](int64_t first_row, int64_t) {
                                            stream->first_sample = first_row;
                                          }}};
        const Tensor inputs = hot(batch_of(1).first.select(1, 0));
        const Tensor mean =
            training.step(inputs, torch::zeros({inputs.size(0), 4}), sum_of_squares).loss;
        if (world.rank() == 0) loss = mean.item<double>();
      });
      EXPECT_TRUE(result.ok()) << result.failures();
      losses.push_back(loss);
    }
  }
  for (const double loss : losses) EXPECT_NEAR(loss, losses[0], 1e-5);
}

TEST(TrainingDegrees, TakesTheDegreesOfTheEnvironment) {
  const auto name_of = [](int num_ranks, const char* text, const TrainingOptions& options = {}) {
    const ScopedVariable chosen(kStrategyVariable, text);
    std::vector<nn::Sequential> decoders = make_decoders(num_ranks);
    std::string name;
    const auto result = run_groups(num_ranks, [&](const ProcessGroup& world) {
      const Decoder training(take(decoders, world).ptr(), with_decay(), world, options);
      if (world.rank() == 0) name = training.division().name();
    });
    EXPECT_TRUE(result.ok()) << result.failures();
    return name;
  };
  EXPECT_EQ(name_of(2, "tensor"), "ddp, tensor 2");
  EXPECT_EQ(name_of(4, "fsdp,tensor=2"), "fsdp, tensor 2");
  EXPECT_EQ(name_of(4, "context=2,tensor"), "ddp, context 2, tensor 2");
  EXPECT_EQ(name_of(2, "pipeline"), "ddp, pipeline 2");
  EXPECT_EQ(name_of(1, "tensor"), "ddp");
  EXPECT_EQ(name_of(2, "tensor", {.strategy = DataStrategy::kFsdp}), "fsdp");
  EXPECT_EQ(name_of(2, "tensor", {.degrees = ModelDegrees{.context = 2}}), "ddp, context 2");
  for (const char* const text :
       {"fsdp,", ",", "tensor,context", "tensor=2,tensor=2", "tensor=", "tensor=0", "tensor=2x",
        "ddp,fsdp", "tensor=99999999999", " ddp"}) {
    const ScopedVariable chosen(kStrategyVariable, text);
    EXPECT_THAT(refusal(2, {}), HasSubstr("CADRE_STRATEGY is \"" + std::string(text) + "\""));
  }
}

}  // namespace
}  // namespace cadre::training_degrees_test
