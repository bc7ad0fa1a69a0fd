// Tests the wrapper's bucket layouts, its weights, and which modules, arguments and results it
// takes.
#include "cadre/parallel/ddp/distributed_data_parallel.h"

#include <array>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cadre/parallel/buckets/gradient_storage.h"
#include "cadre/testing/torch/ddp_peers.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::HasSubstr;

using DistributedDataParallelTest = DdpTest;

TEST_F(DistributedDataParallelTest, TheLayoutIsLearnedInTheFirstStepAndKept) {
  options_.bucket_caps = {.first_bytes = 32, .bytes = 80};
  auto model = wrap();
  EXPECT_FALSE(model.learned_layout());
  loss_of(model(input())).backward();
  ASSERT_TRUE(model.learned_layout());
  const BucketLayout layout = *model.learned_layout();
  // Gradients become ready from the last layer to the first, and in each layer the bias before the
  // weight. This order differs from the reverse order of registration, which the first step uses.
  EXPECT_EQ(layout.to_string(), "float64:3,2;float64:5,4;float64:1,0");
  EXPECT_EQ(BucketLayout::parse(layout.to_string()), layout);

  // A layout that is passed in the options is used from the first step on, and no other layout is
  // learned.
  BucketLayout odd =
      plan_bucket_layout(sizes_of(distinct_parameters(*net_)),
                         std::vector<int64_t>{2, 0, 5, 1, 4, 3}, options_.bucket_caps);
  options_.layout = odd;
  net_ = std::make_shared<Net>();
  auto resumed = wrap();
  peers_.clear_log();
  loss_of(resumed(input())).backward();
  EXPECT_EQ(*resumed.learned_layout(), odd);
  for (const std::string& operation : peers_.log()) EXPECT_THAT(operation, HasSubstr("all_reduce"));
  expect_gradients(*net_, local_gradients(*net_, plain_step), formula_->mean_factor());

  options_.layout->buckets.pop_back();
  net_ = std::make_shared<Net>();
  EXPECT_THAT(error_of([&] { wrap(); }, ErrorCode::kInvalidArgument),
              HasSubstr("the layout belongs to another model"));
}

TEST_F(DistributedDataParallelTest, GradientsKeepTheirParametersMemoryOrder) {
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 4, 2));
  conv->to(kDouble);
  conv->weight.set_data(conv->weight.data().contiguous(torch::MemoryFormat::ChannelsLast));
  DistributedDataParallel model{conv, peers_.group(), options_};
  const Tensor x = torch::ones({1, 3, 4, 4}, kDouble);
  loss_of(model(x)).backward();
  EXPECT_EQ(conv->weight.grad().strides(), conv->weight.strides());
  auto copy = std::dynamic_pointer_cast<torch::nn::Conv2dImpl>(conv->clone());
  copy->zero_grad();
  loss_of(copy->forward(x)).backward();
  EXPECT_TRUE(torch::allclose(conv->weight.grad(), copy->weight.grad() * formula_->mean_factor()));
}

TEST_F(DistributedDataParallelTest, ReplicasAreWeightedBySamples) {
  options_.weighting = GradientWeighting::kSamples;
  auto model = wrap();
  const auto local = local_gradients(*net_, plain_step);
  // The simulated other ranks contribute multiples of this rank's weighted gradient.
  const double sum_factor = formula_->mean_factor() * kWorld;
  formula_->samples = 20;
  model.set_num_samples(5);
  loss_of(model(input())).backward();
  expect_gradients(*net_, local, sum_factor * 5 / 25);
  net_->zero_grad(/*set_to_none=*/false);
  model.set_num_samples(30);
  loss_of(model(input())).backward();
  expect_gradients(*net_, local, sum_factor * 30 / 50);
  net_->zero_grad();
  {
    const auto guard = model.no_sync();
    model.set_num_samples(30);
    loss_of(model(input())).backward();
  }
  model.set_num_samples(10);
  loss_of(model(input())).backward();
  expect_gradients(*net_, local, 2 * sum_factor * 40 / 60);
}

TEST_F(DistributedDataParallelTest, ABackwardIsWeightedByTheSamplesOfItsOwnForwards) {
  options_.weighting = GradientWeighting::kSamples;
  auto model = wrap();
  const auto local = local_gradients(*net_, plain_step);
  const double sum_factor = formula_->mean_factor() * kWorld;
  formula_->samples = 20;
  const auto forward = [&](int64_t num_samples) {
    model.set_num_samples(num_samples);
    return loss_of(model(input()));
  };
  const Tensor of_5 = forward(5);
  const Tensor of_30 = forward(30);
  of_5.backward();
  expect_gradients(*net_, local, sum_factor * 5 / 25);
  net_->zero_grad();
  of_30.backward();
  expect_gradients(*net_, local, sum_factor * 30 / 50);
  net_->zero_grad();
  const Tensor both = forward(5) + forward(5);
  both.backward();
  expect_gradients(*net_, local, 2 * sum_factor * 5 / 25);
  net_->zero_grad();
  const Tensor unlike = forward(5) + forward(30);
  EXPECT_THAT(error_of([&] { unlike.backward(); }, ErrorCode::kInvalidArgument),
              ::testing::AnyOf(HasSubstr("forwards of 30 and 5 samples"),
                               HasSubstr("forwards of 5 and 30 samples")));
  net_->zero_grad();

  // This forward runs outside of no_sync(), but its backward inside. So its samples count for the
  // accumulated gradients.
  const Tensor added_up = forward(10);
  {
    const auto guard = model.no_sync();
    added_up.backward();
  }
  model.reduce_gradients();
  expect_gradients(*net_, local, sum_factor * 10 / 30);
}

TEST_F(DistributedDataParallelTest, ARankWithoutSamplesContributesNothingNotNaN) {
  options_.weighting = GradientWeighting::kSamples;
  auto model = wrap();
  formula_->samples = 8;
  model.set_num_samples(0);
  const Tensor nothing = torch::zeros({0, 3}, kDouble);
  loss_of(model(nothing)).backward();
  for (const Tensor& p : net_->parameters()) {
    EXPECT_TRUE(torch::equal(p.grad(), torch::zeros_like(p)));
  }
}

TEST_F(DistributedDataParallelTest, SparseGradientsAreRefused) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  DistributedDataParallel model{embedding, peers_.group(), options_};
  const Tensor tokens = torch::tensor({1, 2}, torch::kLong);
  EXPECT_THAT(error_of([&] { loss_of(model(tokens)).backward(); }, ErrorCode::kInvalidArgument),
              HasSubstr("\"weight\" is sparse"));
  peers_.begin_threads();
}

TEST_F(DistributedDataParallelTest, OutputsMayBeTuplesVectorsAndOptionals) {
  const Tensor a = torch::ones({1}), b = torch::ones({2}), c = torch::ones({3});
  const auto nested =
      std::make_tuple(a, std::vector<Tensor>{b, Tensor()},
                      std::make_pair(7, std::optional<Tensor>(c)), std::string("x"));
  const auto found = wrap::tensors_of(nested);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[1].numel(), 2);
  EXPECT_EQ(found[2].numel(), 3);
  EXPECT_EQ(wrap::tensors_of(a).size(), 1u);
}

struct Opaque {
  Tensor y, aux;
};

struct Described {
  Tensor y, aux;
};

std::vector<Tensor> held_tensors(const Described& described) {
  return {described.y, described.aux};
}

// Checks which types forward() may return: those in which the wrapper finds all tensors, because it
// must set a hook on each output.
static_assert(wrap::tensors_are_known<Tensor>() && wrap::tensors_are_known<Described>());
static_assert(wrap::tensors_are_known<std::tuple<Tensor, std::vector<std::pair<int, Tensor>>>>());
static_assert(wrap::tensors_are_known<std::map<std::string, std::optional<Tensor>>>());
static_assert(wrap::tensors_are_known<torch::OrderedDict<std::string, Tensor>>());
static_assert(wrap::tensors_are_known<std::array<Tensor, 2>>() &&
              wrap::tensors_are_known<double>());
static_assert(wrap::tensors_are_known<void>());
static_assert(!wrap::tensors_are_known<Opaque>() &&
              !wrap::tensors_are_known<std::shared_ptr<Tensor>>());
static_assert(!wrap::tensors_are_known<std::tuple<Tensor, Opaque>>());
static_assert(!wrap::tensors_are_known<std::vector<Opaque>>() &&
              !wrap::tensors_are_known<Tensor*>());
static_assert(!wrap::tensors_are_known<std::filesystem::path>());

struct TakesAndReturnsStructs : Net {
  Described forward(const Described& given) {
    const Tensor y = Net::forward(given.y);
    return {y, y * 2};
  }
  Described forward(const Opaque& given) { return forward(Described{given.y, given.aux}); }
  void forward() { kept = loss_of(Net::forward(input())); }
  Tensor kept;
};

TEST_F(DistributedDataParallelTest, AStructThatSaysItsTensorsIsSeen) {
  const auto net = std::make_shared<TakesAndReturnsStructs>();
  const auto loss_of_a_wrapper_that_ends = [&] {
    DistributedDataParallel model{net, peers_.group(), options_};
    return loss_of(model(Described{input(), input()}).aux);
  };
  const Tensor lost = loss_of_a_wrapper_that_ends();
  EXPECT_THAT(error_of([&] { lost.backward(); }, ErrorCode::kInvalidArgument),
              HasSubstr("wrapper was destroyed"));
  DistributedDataParallel model{net, peers_.group(), options_};
  formula_->samples = 5;
  loss_of(model(Described{input(), input()}).y).backward();
  expect_gradients(*net, local_gradients(*net_, plain_step), formula_->mean_factor() * kWorld / 2);
  net->zero_grad();
  model();
  net->kept.backward();
  expect_gradients(*net, local_gradients(*net_, plain_step), formula_->mean_factor() * kWorld / 6);
}

TEST_F(DistributedDataParallelTest, ASampleCountThatCannotBeToldIsAskedFor) {
  const auto net = std::make_shared<TakesAndReturnsStructs>();
  DistributedDataParallel model{net, peers_.group(), options_};
  const Opaque batch{input(), input()};
  EXPECT_THAT(error_of([&] { model(batch); }, ErrorCode::kInvalidArgument),
              HasSubstr("Call set_num_samples(n) before it"));
  {
    const torch::NoGradGuard no_grad;
    const Tensor loss = loss_of(model(batch).y);
    EXPECT_THAT(error_of([&] { model.mean_over_ranks(loss); }, ErrorCode::kInvalidArgument),
                HasSubstr("cannot count the samples"));
  }
  formula_->samples = 5;
  model.set_num_samples(15);
  loss_of(model(batch).y).backward();
  expect_gradients(*net, local_gradients(*net_, plain_step),
                   formula_->mean_factor() * kWorld * 15 / 20);
}

TEST_F(DistributedDataParallelTest, TakesHoldersSequentialAndTupleOutputs) {
  torch::nn::Sequential sequential(torch::nn::Linear(3, 2), torch::nn::Tanh());
  sequential->to(kDouble);
  DistributedDataParallel wrapped{sequential, peers_.group()};
  loss_of(wrapped(input())).backward();
  EXPECT_TRUE(sequential->parameters()[0].grad().defined());

  torch::nn::LSTM lstm(3, 2);
  lstm->to(kDouble);
  DistributedDataParallel recurrent{lstm, peers_.group()};
  const auto [output, state] = recurrent(input().unsqueeze(1));
  loss_of(output).backward();
  EXPECT_TRUE(lstm->parameters()[0].grad().defined());
  EXPECT_EQ(recurrent->named_parameters()[0].key(), "weight_ih_l0") << "no prefix";
}

// Returns the number of hooks that the wrapper has set on the output and on the gradient
// accumulators.
size_t num_hooks(const Net& net, const Tensor& output) {
  size_t count = output.grad_fn()->tensor_pre_hooks().size();
  for (const Tensor& parameter : net.parameters()) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
    if (accumulator) count += accumulator->post_hooks().size();
  }
  return count;
}

TEST_F(DistributedDataParallelTest, AWorldOfOneOnlyCallsTheModule) {
  const FakeGroup alone(std::make_shared<PeersFormula>(1));
  DistributedDataParallel model{net_, alone.group(), options_};
  const Tensor output = model(input());
  EXPECT_EQ(num_hooks(*net_, output), 0u);
  loss_of(output).backward();
  const auto plain = local_gradients(*net_, plain_step);
  for (size_t i = 0; i < plain.size(); ++i) {
    const Tensor gradient = net_->parameters()[i].grad();
    EXPECT_TRUE(torch::equal(gradient, plain[i])) << "the bits of a module without a wrapper";
    EXPECT_EQ(gradient.storage().nbytes(), gradient.nbytes()) << "in memory of its own";
  }
  EXPECT_TRUE(alone.log().empty());
  EXPECT_FALSE(model.learned_layout());

  // The same count with several ranks shows that num_hooks() finds the hooks.
  auto wrapped = wrap();
  const Tensor reduced = wrapped(input());
  EXPECT_EQ(num_hooks(*net_, reduced), 1 + net_->parameters().size());
  net_->zero_grad();
  loss_of(reduced).backward();
  EXPECT_GT(net_->first->weight.grad().storage().nbytes(), net_->first->weight.nbytes());
  EXPECT_GT(peers_.num_allocated(), 0);
}

TEST_F(DistributedDataParallelTest, AWorldOfOneTakesWhatNeedsPeersElsewhere) {
  const FakeGroup alone(std::make_shared<PeersFormula>(1));
  DistributedDataParallel model{net_, alone.group(), options_};
  const Tensor loss = loss_of(model(input()));
  loss.backward({}, /*retain_graph=*/true);
  loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  model.reduce_gradients();
  expect_gradients(*net_, local_gradients(*net_, plain_step), 2);
  net_->zero_grad();  // frees the graph, which the gradients of create_graph keep alive
  EXPECT_TRUE(alone.log().empty());
}

TEST_F(DistributedDataParallelTest, ANullModuleIsRefused) {
  const auto expect = [](auto construct) {
    EXPECT_THAT(error_of(construct, ErrorCode::kInvalidArgument), HasSubstr("the module is null"));
  };
  expect([&] { DistributedDataParallel(std::shared_ptr<Net>(), peers_.group()); });
  expect([&] { DistributedDataParallel(torch::nn::Linear(nullptr), peers_.group()); });
  expect([&] {
    DistributedDataParallel(std::shared_ptr<Net>(),
                            FakeGroup(std::make_shared<PeersFormula>(1)).group());
  });
}

TEST_F(DistributedDataParallelTest, AModuleIsWrappedOnceAtATime) {
  const auto again = [&] { wrap(); };
  {
    auto model = wrap();
    EXPECT_THAT(error_of(again, ErrorCode::kInvalidArgument),
                HasSubstr("\"first.weight\" is wrapped already"));
    // A submodule of a wrapped module cannot be wrapped, either.
    const auto part = [&] { DistributedDataParallel(net_->second, peers_.group()); };
    EXPECT_THAT(error_of(part, ErrorCode::kInvalidArgument),
                HasSubstr("\"weight\" is wrapped already"));
    // The graph of this backward must not prevent that the module is wrapped again below.
    loss_of(model(input())).backward();
  }
  net_->zero_grad();
  auto model = wrap();
  loss_of(model(input())).backward();
  expect_gradients(*net_, local_gradients(*net_, plain_step), formula_->mean_factor());
}

TEST_F(DistributedDataParallelTest, HandsOnWhatALoopAsksOfAModule) {
  auto model = wrap();
  EXPECT_EQ(model.parameters().size(), 6u);
  EXPECT_TRUE(model.parameters()[0].is_same(net_->first->weight));
  model.eval();
  EXPECT_FALSE(net_->is_training() || net_->first->is_training());
  model.train();
  EXPECT_TRUE(net_->is_training() && net_->first->is_training());
  model.train(false);
  EXPECT_FALSE(net_->is_training());
}

TEST_F(DistributedDataParallelTest, AModuleWithNothingToTrainIsRefused) {
  for (Tensor& p : net_->parameters()) p.set_requires_grad(false);
  EXPECT_THAT(error_of([&] { wrap(); }, ErrorCode::kInvalidArgument),
              HasSubstr("none of the module's 6 parameters requires grad"));
}

}  // namespace
}  // namespace cadre
