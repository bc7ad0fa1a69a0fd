// Tests archives of torch::save(): an archive can be loaded only by the rank that has saved it, and
// if loading fails on one rank, no state changes on any rank. Also tests option classes that the
// program defines.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/log_lines.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/testing/torch/zero_net.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::failure_of;
using ::testing::HasSubstr;
using testing::require;
using testing::run_groups;
using torch::Tensor;

// A model of one parameter with 64 elements, of which each of 2 ranks owns 32.
struct Row : torch::nn::Module {
  Row() { v = register_parameter("v", torch::linspace(-1, 1, 64, torch::kDouble)); }
  void backward(int step) { v.mutable_grad() = torch::arange(64, torch::kDouble).add(step).sin(); }
  Tensor v;
};

template <typename O>
using Zero = ZeroRedundancyOptimizer<O>;

std::string saved(const torch::optim::Optimizer& optimizer) {
  std::stringstream stream;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(stream);
  return stream.str();
}

void load(torch::optim::Optimizer& optimizer, const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  optimizer.load(archive);
}

// Trains 2 steps, lets each rank load the archive that bytes_of() returns, and trains 2 more steps,
// which must be correct. Returns the error of load() on each rank.
template <typename O>
std::vector<std::string> load_in_training(
    const std::function<std::string(const ProcessGroup&, const torch::optim::Optimizer&)>&
        bytes_of) {
  const torch::optim::AdamWOptions options(0.01);
  const auto result = run_groups(2, [&](const ProcessGroup& group, std::string& output) {
    Row plain;
    Row row;
    O plain_optimizer(plain.parameters(), options);
    Zero<O> zero(row.named_parameters(), group, options);
    const auto train = [&](int step) {
      plain.backward(step);
      plain_optimizer.step();
      row.backward(step);
      zero.step();
      require(torch::equal(plain.v, row.v), "step " + std::to_string(step));
    };
    train(0);
    train(1);
    output = failure_of([&] { load(zero, bytes_of(group, zero)); });
    train(2);
    train(3);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
  return {result.ranks[0].output, result.ranks[1].output};
}

TEST(ZeroArchive, AFileOfEachRankIsLoadedAndThatOfOneRankIsRefusedOnAll) {
  EXPECT_THAT(load_in_training<AdamW>([](const ProcessGroup&, const torch::optim::Optimizer& zero) {
                return saved(zero);
              }),
              ElementsAre("", ""));
  const auto rank_zeros = [](const ProcessGroup& group, const torch::optim::Optimizer& zero) {
    return gather_texts(group, "test", [&] { return saved(zero); })[0];
  };
  const auto is_refused =
      AllOf(HasSubstr("kInvalidArgument: ZeroRedundancyOptimizer of "),
            HasSubstr("the archive has the state of the shards of rank 0 of 2; expected those of "
                      "rank 1 of 2. An archive has the state of one rank's shards: save and load "
                      "one file for each rank"));
  EXPECT_THAT(load_in_training<AdamW>(rank_zeros), ElementsAre(is_refused, is_refused));
  EXPECT_THAT(load_in_training<torch::optim::AdamW>(rank_zeros),
              ElementsAre(is_refused, is_refused));
}

TEST(ZeroArchive, OneOfAnotherOptimizerOrOtherGroupsIsRefused) {
  const auto options = torch::optim::AdamWOptions(0.01);
  const auto is_nobodys = HasSubstr(
      "the archive does not say which rank's shards it has the state of; expected those "
      "of rank ");
  EXPECT_THAT(load_in_training<AdamW>([&](const ProcessGroup&, const torch::optim::Optimizer&) {
                return saved(AdamW({torch::ones({64}, torch::kDouble)}, options));
              }),
              ElementsAre(is_nobodys, is_nobodys));
  // Only rank 1 has a wrong archive. Loading must throw on both ranks, and rank 0 must keep its
  // state, too.
  const auto are_others = HasSubstr("has the state of rank 1 of 2 for other parameter groups");
  EXPECT_THAT(
      load_in_training<AdamW>([&](const ProcessGroup& group, const torch::optim::Optimizer& zero) {
        Row other;
        const Zero<AdamW> renamed({{"w", other.v}}, group, options);
        return saved(group.rank() == 0 ? zero : renamed);
      }),
      ElementsAre(are_others, are_others));
}

template <typename Derived>
struct OptionsOfProgram : torch::optim::OptimizerCloneableOptions<Derived> {
  explicit OptionsOfProgram(double rate, double decay_rate = 0) : lr(rate), decay(decay_rate) {}
  double get_lr() const override { return lr; }
  void set_lr(double value) override { lr = value; }
  double lr;
  double decay;
};

struct Unserialized : OptionsOfProgram<Unserialized> {
  using OptionsOfProgram::OptionsOfProgram;
};

struct Serialized : OptionsOfProgram<Serialized> {
  using OptionsOfProgram::OptionsOfProgram;
  using torch::optim::OptimizerOptions::serialize;
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(lr));
    archive.write("decay", c10::IValue(decay));
  }
};

template <typename Options>
class Descent : public torch::optim::Optimizer {
 public:
  Descent(const std::vector<torch::optim::OptimizerParamGroup>& groups, const Options& defaults)
      : Optimizer(groups, std::make_unique<Options>(defaults)) {}

  Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_grad;
    for (const auto& group : param_groups()) {
      const auto& options = static_cast<const Options&>(group.options());
      for (const Tensor& parameter : group.params()) {
        if (parameter.grad().defined()) {
          parameter.mul_(1 - options.decay).sub_(parameter.grad(), options.lr);
        }
      }
    }
    return {};
  }
};

// Makes three steps with equal options on both ranks, and then one step for which rank 1 has
// changed `decay`. Returns the error of the last step on each rank.
template <typename Options>
std::vector<std::string> step_with_other_options(const std::shared_ptr<testing::LogLines>& log) {
  const auto result =
      run_groups(2,
                 [](const ProcessGroup& group, std::string& output) {
                   Row row;
                   Zero<Descent<Options>> zero(row.named_parameters(), group, Options(0.1, 0.25));
                   for (int step = 0; step < 3; ++step) {
                     row.backward(step);
                     zero.step();
                   }
                   if (group.rank() == 1) {
                     static_cast<Options&>(zero.param_groups()[0].options()).decay = 0.5;
                   }
                   output = failure_of([&] { zero.step(); });
                 },
                 {.log = log});
  EXPECT_TRUE(result.ok()) << result.failures();
  return {result.ranks[0].output, result.ranks[1].output};
}

TEST(ZeroOptions, AFieldThatAClassOfTheProgramSerializesIsCompared) {
  const auto log = std::make_shared<testing::LogLines>();
  const auto is_refused = AllOf(HasSubstr("Serialized, lr 0.1, decay 0.25) on rank 0"),
                                HasSubstr("Serialized, lr 0.1, decay 0.5) on rank 1"));
  EXPECT_THAT(step_with_other_options<Serialized>(log), ElementsAre(is_refused, is_refused));
  EXPECT_THAT(log->get(), ElementsAre());
}

TEST(ZeroOptions, OneWarningSaysThatAClassWithoutSerializeIsNotCompared) {
  const auto log = std::make_shared<testing::LogLines>();
  EXPECT_THAT(step_with_other_options<Unserialized>(log), ElementsAre("", ""));
  EXPECT_THAT(log->get(),
              ElementsAre(AllOf(HasSubstr("zero options are not compared between the ranks class="),
                                HasSubstr("Unserialized\""))));
}

}  // namespace
}  // namespace cadre
