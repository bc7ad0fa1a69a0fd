// Tests that ShardUnit<M> can be used wherever an M can, what fully_shard() refuses, and which
// parameters belong to which unit.
#include "cadre/parallel/fsdp/shard_unit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cadre/parallel/fsdp/unit_assignment.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: the helpers of these tests
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  explicit BlockImpl(int64_t width = 3) {
    linear = register_module("linear", nn::Linear(width, width));
  }
  Tensor forward(const Tensor& x) { return torch::tanh(linear(x)); }
  nn::Linear linear{nullptr};
};
using Block = nn::ModuleHolder<ShardUnit<BlockImpl>>;

struct VirtualImpl : nn::Module {
  virtual Tensor forward(const Tensor& x) { return x + 1; }
};

struct ConstImpl : nn::Module {
  std::tuple<Tensor, std::optional<Tensor>> forward(Tensor x, int64_t times) const {
    return {x * times, std::nullopt};
  }
};

struct SilentImpl : nn::Module {
  void forward(const Tensor& x) { seen = x; }
  Tensor seen;
};

TEST(ShardUnit, IsTheModuleItIsMadeOf) {
  torch::manual_seed(1);
  Block block(3);
  const Tensor x = torch::randn({2, 3});
  EXPECT_TRUE(torch::equal(block->forward(x), torch::tanh(block->linear(x))));
  EXPECT_TRUE(torch::equal(block(x), block->forward(x)));
  EXPECT_THAT(block->named_parameters().keys(), ElementsAre("linear.weight", "linear.bias"));

  nn::Sequential sequential(nn::Linear(3, 3), Block(3), ShardUnit<nn::LinearImpl>(3, 2));
  EXPECT_EQ(sequential->forward(x).size(1), 2);
  nn::AnyModule any{Block(3)};
  EXPECT_EQ(any.forward(x).size(1), 3);
  EXPECT_NE(sequential->children()[1]->as<ShardUnit<BlockImpl>>(), nullptr);
}

TEST(ShardUnit, KeepsTheSignatureOfForward) {
  ShardUnit<ConstImpl> unit;
  const auto [product, nothing] = std::as_const(unit).forward(torch::ones({1}), 3);
  EXPECT_EQ(product.item<float>(), 3);
  EXPECT_FALSE(nothing);
  const auto overrides = std::make_shared<ShardUnit<VirtualImpl>>();
  EXPECT_EQ(static_cast<VirtualImpl&>(*overrides).forward(torch::ones({1})).item<float>(), 2);
  EXPECT_THAT(error_of(
                  [&] {
                    overrides->binding().is_declared = true;
                    static_cast<VirtualImpl&>(*overrides).forward(torch::ones({1}));
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("no FullyShardedDataParallel was made of the model"))
      << "a call through the base class comes to the unit";
  ShardUnit<SilentImpl> silent;
  silent.forward(torch::ones({2}));
  EXPECT_EQ(silent.seen.numel(), 2);
  static_assert(std::is_same_v<wrap::ForwardPointer<nn::SequentialImpl>, wrap::NoSingleForward>);
}

TEST(FullyShard, RefusesWhatCannotBeAUnit) {
  Block block(3);
  fully_shard(block);
  EXPECT_THAT(error_of([&] { fully_shard(block); }, ErrorCode::kInvalidArgument),
              HasSubstr("called twice for one"));
  EXPECT_THAT(error_of(
                  [&] {
                    block(torch::ones({1, 3}));
                  },
                  ErrorCode::kInvalidArgument),
              HasSubstr("no FullyShardedDataParallel was made of the model"));
  EXPECT_THAT(error_of([&] { fully_shard(*nn::Linear(2, 2)); }, ErrorCode::kInvalidArgument),
              HasSubstr("is not a ShardUnit"));
  EXPECT_THAT(error_of([&] { fully_shard(std::make_shared<ShardUnit<VirtualImpl>>()); },
                       ErrorCode::kInvalidArgument),
              HasSubstr("has no parameters to shard"));
  const auto copy = std::make_shared<ShardUnit<BlockImpl>>(*block);
  EXPECT_NO_THROW(fully_shard(copy)) << "a copy is not declared";
}

// A model of two blocks, the second of which contains another block, and of a head that is tied to
// the first block.
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
  EXPECT_THAT(units_with(wrap_by_size(12)), ElementsAre("", "first", "nest", "nest.inner"));
  EXPECT_THAT(units_with(wrap_by_size(13)), ElementsAre("", "first", "nest"));
  EXPECT_THAT(units_with(wrap_by_size(25)), ElementsAre("", "first"));
  EXPECT_THAT(units_with(wrap_by_type<NestImpl>()), ElementsAre("", "first", "nest"));
  EXPECT_THAT(units_with([&](const WrapCandidate& candidate) {
                asked.push_back(candidate.name + " " + std::to_string(candidate.numel));
                return false;
              }),
              ElementsAre("", "first"));
  EXPECT_THAT(asked, ElementsAre("nest.inner 12", "nest 24"));
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
}  // namespace cadre
