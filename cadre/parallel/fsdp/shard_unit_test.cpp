// Tests that ShardUnit<M> can be used wherever an M can, and for which modules fully_shard()
// throws.
#include "cadre/parallel/fsdp/shard_unit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <tuple>

#include "cadre/testing/torch/wrap_net.h"

namespace cadre {
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

}  // namespace
}  // namespace cadre
