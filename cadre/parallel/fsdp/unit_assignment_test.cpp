// Tests which modules of a model become units, and to which unit each parameter belongs.
#include "cadre/parallel/fsdp/unit_assignment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre::unit_assignment_test {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width = 3) {
    linear = register_module("linear", nn::Linear(width, width));
  }
  Tensor forward(const Tensor& x) { return torch::tanh(linear(x)); }
  nn::Linear linear{nullptr};
};
using Block = nn::ModuleHolder<ShardUnit<BlockImpl>>;

// A unit with another unit, `inner`, and a layer of its own.
struct NestImpl : nn::Module {
  NestImpl() {
    inner = register_module("inner", Block(3));
    linear = register_module("linear", nn::Linear(3, 3));
  }
  Tensor forward(const Tensor& x) { return inner(linear(x)); }
  Block inner{nullptr};
  nn::Linear linear{nullptr};
};
using Nest = nn::ModuleHolder<ShardUnit<NestImpl>>;

struct Tree : nn::Module {
  Tree() {
    first = register_module("first", Block(3));
    nest = register_module("nest", Nest());
    head = register_module("head", nn::Linear(3, 3));
  }
  Block first{nullptr};
  Nest nest{nullptr};
  nn::Linear head{nullptr};
};

std::map<std::string, std::vector<std::string>> held_by_units(
    const parallel::UnitAssignment& assignment) {
  std::map<std::string, std::vector<std::string>> held;
  for (const parallel::AssignedUnit& unit : assignment.units) {
    auto& names = held[unit.name];
    for (const NamedTensor& parameter : unit.parameters) names.push_back(parameter.name);
  }
  return held;
}

TEST(UnitAssignment, GivesAParameterToTheInnermostUnit) {
  const auto tree = std::make_shared<Tree>();
  fully_shard(tree->nest);
  fully_shard(tree->nest->inner);
  auto held = held_by_units(parallel::assign_units(tree, {}));
  EXPECT_THAT(held[""],
              ElementsAre("first.linear.weight", "first.linear.bias", "head.weight", "head.bias"));
  EXPECT_THAT(held["nest"], ElementsAre("nest.linear.weight", "nest.linear.bias"));
  EXPECT_THAT(held["nest.inner"],
              ElementsAre("nest.inner.linear.weight", "nest.inner.linear.bias"));
}

TEST(UnitAssignment, GivesATiedParameterToTheUnitAroundAllUses) {
  const auto tree = std::make_shared<Tree>();
  fully_shard(tree->first);
  fully_shard(tree->nest);
  fully_shard(tree->nest->inner);
  tree->nest->register_parameter("again", tree->nest->inner->linear->weight);
  tree->head->register_parameter("tied", tree->first->linear->bias);
  auto held = held_by_units(parallel::assign_units(tree, {}));
  EXPECT_THAT(held[""], ElementsAre("first.linear.bias", "head.weight", "head.bias"));
  EXPECT_THAT(held["first"], ElementsAre("first.linear.weight"));
  EXPECT_THAT(held["nest"], ElementsAre("nest.again", "nest.linear.weight", "nest.linear.bias"));
  EXPECT_THAT(held["nest.inner"], ElementsAre("nest.inner.linear.bias"));
}

// A head that uses the parameters of another module without registering them.
struct TiedHead : nn::Module, SharingModule {
  explicit TiedHead(nn::Linear given) : linear(std::move(given)) {}
  std::shared_ptr<Module> shared_module() const override { return linear.ptr(); }
  nn::Linear linear;
};

TEST(UnitAssignment, GivesWhatASharingModuleUsesToTheUnitAroundBoth) {
  for (const bool is_before : {false, true}) {
    const Block block(3);
    const auto head = std::make_shared<TiedHead>(block->linear);
    const auto root = std::make_shared<nn::Module>();
    if (is_before) root->register_module("head", head);
    root->register_module("block", block);
    if (!is_before) root->register_module("head", head);
    fully_shard(block);
    auto held = held_by_units(parallel::assign_units(root, {}));
    EXPECT_THAT(held[""], ElementsAre("block.linear.weight", "block.linear.bias"));
    EXPECT_TRUE(held["block"].empty());
  }
}

TEST(UnitAssignment, AsksThePolicyForWhatIsNotDeclared) {
  const auto tree = std::make_shared<Tree>();
  fully_shard(tree->first);
  std::vector<std::string> asked;
  const auto units_with = [&](const WrapPolicy& policy) {
    std::vector<std::string> names;
    for (const parallel::AssignedUnit& unit :
         parallel::assign_units(tree, {.wrap_policy = policy}).units) {
      names.push_back(unit.name);
    }
    return names;
  };
  EXPECT_THAT(units_with(wrap_shard_units()), ElementsAre("", "first", "nest", "nest.inner"));
  EXPECT_THAT(units_with(wrap_by_size(12)),
              ElementsAre("", "first", "first.linear", "nest.inner.linear", "nest.linear", "head"));
  EXPECT_THAT(units_with(wrap_by_size(13)), ElementsAre("", "first", "nest"));
  EXPECT_THAT(units_with(wrap_by_size(25)), ElementsAre("", "first"));
  EXPECT_THAT(units_with(wrap_by_type<NestImpl>()), ElementsAre("", "first", "nest"));
  EXPECT_THAT(units_with([&](const WrapCandidate& candidate) {
                asked.push_back(candidate.name + " " + std::to_string(candidate.numel));
                return false;
              }),
              ElementsAre("", "first"));
  EXPECT_THAT(asked, ElementsAre("first.linear 12", "nest.inner.linear 12", "nest.inner 12",
                                 "nest.linear 12", "nest 24", "head 12"));
}

std::vector<std::string> units_of(const std::shared_ptr<nn::Module>& model,
                                  const WrapPolicy& policy) {
  std::vector<std::string> names;
  for (const parallel::AssignedUnit& unit :
       parallel::assign_units(model, {.wrap_policy = policy}).units) {
    if (!unit.is_root) names.push_back(unit.name);
  }
  return names;
}

TEST(UnitAssignment, FindsUnitsByTheirNames) {
  const auto tree = std::make_shared<Tree>();
  EXPECT_THAT(units_of(tree, wrap_by_name({"nest"})), ElementsAre("nest"));
  EXPECT_THAT(units_of(tree, wrap_by_name({"*"})), ElementsAre("first", "nest", "head"));
  EXPECT_THAT(units_of(tree, wrap_by_name({"*.linear"})),
              ElementsAre("first.linear", "nest.linear"));
  EXPECT_THAT(units_of(tree, wrap_by_name({"*.*.l*r", "h*"})),
              ElementsAre("nest.inner.linear", "head"));
  EXPECT_THAT(units_of(tree, wrap_by_name({"ne", "est", "nest.inn"})), ElementsAre());
  EXPECT_THAT(error_of(
                  [] {
                    wrap_by_name({"first", ""});
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("a pattern is missing or empty"));
}

TEST(UnitAssignment, FindsTheLayersOfAModel) {
  const auto model = std::make_shared<nn::Module>();
  model->register_module("stem", nn::Linear(3, 3));
  const nn::Sequential stage(nn::Linear(3, 3), nn::Tanh(), nn::Linear(3, 3));
  nn::ModuleList stages;
  stages->push_back(stage);
  stages->push_back(nn::Linear(3, 3));
  model->register_module("stages", stages);
  const auto encoder = nn::TransformerEncoder(
      nn::TransformerEncoderOptions(nn::TransformerEncoderLayerOptions(4, 2), 2));
  model->register_module("encoder", encoder);
  // A layer with a container of its own.
  const auto block = std::make_shared<nn::Module>();
  block->register_module("linear", nn::Linear(3, 3));
  block->register_module("shortcut", nn::Sequential(nn::Linear(3, 3)));
  nn::ModuleList blocks;
  blocks->push_back(block);
  model->register_module("blocks", blocks);
  EXPECT_THAT(units_of(model, wrap_layers()),
              ElementsAre("stages.0.0", "stages.0.2", "stages.1", "encoder.layers.0",
                          "encoder.layers.1", "blocks.0"));
  EXPECT_THAT(units_of(stages.ptr(), wrap_layers()), ElementsAre("0.0", "0.2", "1"));
  EXPECT_THAT(units_of(stage.ptr(), wrap_layers()), ElementsAre("0", "2"));
}

TEST(UnitAssignment, GivesUnitsTheOptionsOfThePolicy) {
  const auto tree = std::make_shared<Tree>();
  fully_shard(tree->first, {.reshard = Reshard::kAfterReduction});
  const WrapPolicy policy = wrap_by_name({"first", "head"}, {.reshard = Reshard::kAfterBackward});
  const auto units = parallel::assign_units(tree, {.wrap_policy = policy}).units;
  ASSERT_EQ(units.size(), 3U);
  EXPECT_EQ(units[0].options.reshard, std::nullopt);
  EXPECT_EQ(units[1].options.reshard, Reshard::kAfterReduction);
  EXPECT_EQ(units[2].options.reshard, Reshard::kAfterBackward);
}

TEST(UnitAssignment, LeavesIgnoredParametersOut) {
  const auto tree = std::make_shared<Tree>();
  fully_shard(tree->nest);
  const auto assignment = parallel::assign_units(tree, {.ignored = {"nest.inner", "head.bias"}});
  auto held = held_by_units(assignment);
  EXPECT_THAT(held["nest"], ElementsAre("nest.linear.weight", "nest.linear.bias"));
  EXPECT_THAT(held[""], ElementsAre("first.linear.weight", "first.linear.bias", "head.weight"));
  EXPECT_EQ(assignment.ignored.size(), 3);
  EXPECT_THAT(error_of([&] { parallel::assign_units(tree, {.ignored = {"hea"}}); },
                       ErrorCode::kInvalidArgument),
              HasSubstr("options.ignored names \"hea\", but the model has no such parameter"));
}

TEST(UnitAssignment, RefusesTheRootAsAUnit) {
  const Nest root;
  fully_shard(root);
  EXPECT_THAT(
      error_of([&] { parallel::assign_units(root.ptr(), {}); }, ErrorCode::kInvalidArgument),
      HasSubstr("fully_shard() was called for the model itself"));
}

}  // namespace
}  // namespace cadre::unit_assignment_test
