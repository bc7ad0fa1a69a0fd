// Tests save() and load() of a module's tensors in one file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/tensor/hooks/shard_mark.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/checkpoint/module_file.h"
#include "cadre/train/checkpoint/snapshot_parts.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;

class ModuleFileTest : public ::testing::Test {
 protected:
  testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("x.safetensors");
};

TEST_F(ModuleFileTest, AModuleComesBack) {
  torch::nn::Sequential a(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  torch::nn::Sequential b(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
  a->forward(torch::randn({5, 3}));  // updates the running statistics
  save(*a, path_);
  load(*b, path_);
  const std::vector<NamedTensor> expected = named_state(*a);
  const std::vector<NamedTensor> actual = named_state(*b);
  ASSERT_EQ(actual.size(), 7u);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(actual[i].tensor.equal(expected[i].tensor)) << expected[i].name;
  }
  EXPECT_TRUE(b->parameters()[0].requires_grad());
}

// If save() accepted the module, the file would have one rank's shards in place of whole
// parameters.
TEST_F(ModuleFileTest, AModuleWithShardsIsRefused) {
  torch::nn::Sequential module(torch::nn::Linear(3, 4));
  wrap::mark_as_shard(
      module->parameters()[0],
      {.parameter = "0.weight", .owner = "divided by kColwise", .rank = 1, .num_ranks = 2});
  const auto message = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  };
  const std::string problem =
      ": \"0.weight\" is not the whole parameter, but this rank's shard of it, divided by kColwise "
      "(rank 1 of the 2 that divide it). ";
  EXPECT_THAT(message([&] { save(*module, path_); }), ::testing::HasSubstr("save" + problem));
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_THAT(message([&] { load(*module, path_); }), ::testing::HasSubstr("load" + problem));
  EXPECT_THAT(message([&] { parts_of(*module); }), ::testing::HasSubstr("parts_of" + problem));
  EXPECT_THAT(message([&] { parts_of(std::span<const ParameterShard>(), *module); }),
              ::testing::HasSubstr("parts_of" + problem));
}

TEST_F(ModuleFileTest, HoldersAndPointersToModulesAreSaved) {
  torch::nn::Linear a(3, 4);
  torch::nn::Linear b(3, 4);
  save(a, path_);
  load(b, path_);
  EXPECT_TRUE(a->weight.equal(b->weight));
  const auto c = std::make_shared<torch::nn::LinearImpl>(3, 4);
  save(c, path_);
  load(b, path_);
  EXPECT_TRUE(c->weight.equal(b->weight));
}

TEST_F(ModuleFileTest, AModuleThatDoesNotFitIsLeftAlone) {
  torch::nn::Linear small(2, 2);
  save(*small, path_);
  const auto message = [&](torch::nn::Module& module) {
    try {
      load(module, path_);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string();
  };
  torch::nn::Linear wide(3, 2);
  const at::Tensor before = wide->bias.clone();
  EXPECT_THAT(message(*wide), ::testing::HasSubstr("'weight' is Float [2, 2], but the model has "
                                                   "Float [2, 3]"));
  EXPECT_TRUE(wide->bias.equal(before));
  torch::nn::Linear without(torch::nn::LinearOptions(2, 2).bias(false));
  EXPECT_THAT(message(*without), ::testing::HasSubstr("'bias', which the model does not"));
  torch::nn::Bilinear other(2, 2, 2);
  EXPECT_THAT(message(*other), ::testing::HasSubstr("'weight' is Float"));
}

}  // namespace
}  // namespace cadre
