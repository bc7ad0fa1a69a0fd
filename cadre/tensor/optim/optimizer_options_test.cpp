// Tests the texts by which ranks compare optimizer options whose class is defined by the program.
#include "cadre/tensor/optim/optimizer_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/testing/core/log_lines.h"

namespace cadre::optim_state {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;

template <typename Derived>
struct OptionsOfProgram : torch::optim::OptimizerCloneableOptions<Derived> {
  double lr = 0.1;
  double decay = 0;
  double get_lr() const override { return lr; }
  void set_lr(double value) override { lr = value; }
};

struct Unserialized : OptionsOfProgram<Unserialized> {};

struct Serialized : OptionsOfProgram<Serialized> {
  std::string schedule = "flat";
  torch::Tensor scales = torch::ones({2});
  std::vector<int64_t> milestones = {3, 5};
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(lr));
    archive.write("decay", c10::IValue(decay));
    archive.write("schedule", c10::IValue(schedule));
    archive.write("milestones", c10::IValue(milestones));
    archive.write("bounds", c10::IValue(std::make_tuple(0.5, true)));
    torch::serialize::OutputArchive nested(archive.compilation_unit());
    nested.write("scales", scales);
    archive.write("tensors", nested);
  }
  using torch::optim::OptimizerOptions::serialize;
};

struct WithField : AdamWOptions {
  using AdamWOptions::AdamWOptions;
  double noise = 0;
};

struct WithSerializedField : WithField {
  using WithField::WithField;
  void serialize(torch::serialize::OutputArchive& archive) const override {
    AdamWOptions::serialize(archive);
    archive.write("noise", c10::IValue(noise));
  }
  using AdamWOptions::serialize;
};

TEST(OptimizerOptions, EachFieldThatAClassSerializesIsCompared) {
  const std::string text = text_of(Serialized());
  EXPECT_THAT(text, AllOf(HasSubstr("Serialized, lr 0.1, decay 0, schedule \"flat\", milestones "
                                    "(3, 5), bounds (0.5, true), tensors.scales a Float tensor (2) "
                                    "with the digest ")));
  EXPECT_TRUE(has_whole_text(Serialized()));
  EXPECT_EQ(text, text_of(Serialized()));
  const auto changed = [](auto change) {
    Serialized options;
    change(options);
    return text_of(options);
  };
  EXPECT_NE(text, changed([](Serialized& options) { options.decay = 1e-300; }));
  EXPECT_NE(text, changed([](Serialized& options) { options.schedule = "flat "; }));
  EXPECT_NE(text, changed([](Serialized& options) { options.scales[1] = 2; }));
  EXPECT_NE(text, changed([](Serialized& options) { options.milestones[1] = 6; }));
  // A tensor with the same elements has the same text, even if it is a view of other memory.
  EXPECT_EQ(text, changed([](Serialized& options) {
              options.scales = torch::tensor({7, 1, 1}, torch::kFloat).slice(0, 1);
            }));
}

TEST(OptimizerOptions, AClassWithoutSerializeIsKnownByItsNameAndLearningRate) {
  EXPECT_THAT(text_of(Unserialized()), EndsWith("Unserialized, lr 0.1"));
  EXPECT_FALSE(has_whole_text(Unserialized()));
  EXPECT_TRUE(has_whole_text(AdamWOptions(0.1)));
  EXPECT_THAT(text_of(torch::optim::LBFGSOptions(0.5)), HasSubstr("LBFGSOptions, lr 0.5, "));
  EXPECT_TRUE(has_whole_text(torch::optim::LBFGSOptions(0.5)));
}

TEST(OptimizerOptions, ADerivedClassIsWholeIfItSerializesMore) {
  WithSerializedField serialized(0.1);
  serialized.noise = 0.25;
  EXPECT_THAT(text_of(serialized), AllOf(HasSubstr("WithSerializedField, lr 0.1, betas 0.9 "),
                                         EndsWith("amsgrad false, noise 0.25")));
  EXPECT_TRUE(has_whole_text(serialized));
  EXPECT_THAT(text_of(WithField(0.1)),
              AllOf(HasSubstr("WithField, lr 0.1, betas 0.9 "), EndsWith("amsgrad false")));
  EXPECT_FALSE(has_whole_text(WithField(0.1)));
}

TEST(OptimizerOptions, OneWarningForEachClassThatIsNotComparedAsAWhole) {
  const torch::Tensor parameter = torch::ones({1});
  std::vector<OptimizerParamGroup> groups;
  const auto add = [&](std::unique_ptr<torch::optim::OptimizerOptions> options) {
    groups.emplace_back(std::vector<torch::Tensor>{parameter}, std::move(options));
  };
  add(std::make_unique<AdamWOptions>(0.1));
  add(std::make_unique<Unserialized>());
  add(std::make_unique<Unserialized>());
  add(std::make_unique<Serialized>());
  const GroupTerms terms{
      .groups = groups, .defaults = nullptr, .name_of = [](const at::Tensor&) { return "p"; }};
  testing::LogLines log;
  UncomparedOptions uncompared;
  for (int step = 0; step < 3; ++step) uncompared.warn(log, "zero", terms);
  EXPECT_THAT(log.get(), ElementsAre(AllOf(
                             StartsWith("zero options are not compared between the ranks class=\""),
                             HasSubstr("Unserialized\" compared=\""), HasSubstr("lr 0.1\""))));
}

}  // namespace
}  // namespace cadre::optim_state
