// Compares the whole messages of the errors that sharded wrappers throw for mistakes in a program.
// Each message says what is wrong, on which rank, and what to do. "{rank}" stands for the rank that
// throws.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/parallel/ddp/distributed_data_parallel.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/parallel/shard/grad_scaler.h"
#include "cadre/parallel/shard/sharded_norm.h"
#include "cadre/parallel/zero/zero_redundancy_optimizer.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

using torch::Tensor;
namespace nn = torch::nn;

struct LayerImpl : nn::Module {
  LayerImpl() {
    linear = register_module("linear", nn::Linear(4, 4));
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : parameters()) parameter.fill_(0.25);
  }
  Tensor forward(const Tensor& x) { return torch::tanh(linear(x)); }
  nn::Linear linear{nullptr};
};
using Layer = nn::ModuleHolder<ShardUnit<LayerImpl>>;

struct Layers : nn::Module {
  Layers() {
    for (int i = 0; i < 2; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Layer()));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (const size_t i : order) h = layers[i]->forward(h);
    return h;
  }
  std::vector<Layer> layers;
  std::vector<size_t> order = {0, 1};
};

Tensor rows_of(const ProcessGroup& group) {
  return torch::ones({3, 4}) * (1 + group.rank());
}

FullyShardedDataParallelOptions every_layer() {
  return {.wrap_policy = wrap_shard_units()};
}

using Sharded = FullyShardedDataParallel<Layers>;
using Replicated = DistributedDataParallel<Layers>;

template <typename Model>
void backward(Model& model, const ProcessGroup& group) {
  model(rows_of(group)).pow(2).mean().backward();
}

// Runs `mistake` on two ranks; it must return the message of the error that it gets.
void expect_sentence(const std::string& expected,
                     const std::function<std::string(const ProcessGroup&)>& mistake) {
  const auto result = testing::run_groups(
      2, [&](const ProcessGroup& group, std::string& output) { output = mistake(group); });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (int rank = 0; rank < 2; ++rank) {
    std::string sentence = expected;
    for (size_t at; (at = sentence.find("{rank}")) != std::string::npos;) {
      sentence.replace(at, 6, std::to_string(rank));
    }
    EXPECT_EQ(result.ranks[static_cast<size_t>(rank)].output, sentence);
  }
}

template <typename Function>
std::string told(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error.message();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing";
}

TEST(ShardedMisuse, AnOptimizerThatWasMadeBeforeSharding) {
  expect_sentence(
      "FullyShardedDataParallel, rank {rank}: an operation writes to the parameters of unit "
      "\"layer0\", which are sharded. Make an optimizer from the wrapper (model.parameters()), not "
      "from the parameters of the module. To change values, hold summon_full_params() and write "
      "back",
      [](const ProcessGroup& group) {
        const auto net = std::make_shared<Layers>();
        torch::optim::SGD optimizer(net->parameters(), 0.1);
        Sharded model{net, group, every_layer()};
        backward(model, group);
        return told([&] { optimizer.step(); });
      });
}

TEST(ShardedMisuse, AnOptimizerOfTheModulesParametersUnderShardedGradients) {
  expect_sentence(
      "DistributedDataParallel, rank {rank}: the gradient of the module's parameter "
      "\"layer0.linear.weight\" is gone, because it was reduced to the gradients of the ranks' "
      "shards. With GradientPlacement::kSharded make a cadre::ZeroRedundancyOptimizer from the "
      "wrapper; read gradients from the wrapper's parameter_shards(), and let zero_grad() set "
      "gradients to none.",
      [](const ProcessGroup& group) {
        const auto net = std::make_shared<Layers>();
        Replicated model{net, group, {.gradients = GradientPlacement::kSharded}};
        torch::optim::SGD optimizer(model.parameters(), 0.1);
        backward(model, group);
        return told([&] { optimizer.step(); });
      });
}

TEST(ShardedMisuse, AParameterIsTouchedWhileItIsSharded) {
  expect_sentence(
      "The values of parameters of unit \"layer1\" of FullyShardedDataParallel are sharded: this "
      "rank has only a part of them. To use them, call the wrapper's forward(), or hold "
      "summon_full_params(). Make an optimizer from the wrapper (model.parameters()), not from the "
      "parameters of the module. Save and load snapshots with "
      "cadre::parts_of(model.parameter_shards(), module). Use the graph of a derivative "
      "(autograd::grad() with create_graph) before the wrapper's next backward. A module whose "
      "forward() reads memory without an operation of libtorch must be a cadre::ShardUnit.",
      [](const ProcessGroup& group) {
        const auto net = std::make_shared<Layers>();
        const Sharded model{net, group, every_layer()};
        return told([&] { net->layers[1]->linear->weight.const_data_ptr(); });
      });
}

TEST(ShardedMisuse, AUnitIsCalledOutsideOfTheWrapper) {
  expect_sentence(
      "FullyShardedDataParallel, rank {rank}: unit \"layer1\" was called outside of the wrapper's "
      "forward(). Call the FullyShardedDataParallel, whose forward() calls its units. To call one "
      "module alone, copy its parameters under summon_full_params() into another module",
      [](const ProcessGroup& group) {
        const auto net = std::make_shared<Layers>();
        const Sharded model{net, group, every_layer()};
        return told([&] { net->layers[1]->forward(rows_of(group)); });
      });
}

TEST(ShardedMisuse, RanksHaveOtherUnits) {
  expect_sentence(
      "FullyShardedDataParallel on group \"world\": the list of units is none on rank 0 and "
      "\"layer0\" on rank 1; call fully_shard() for the same modules, and give it and the wrapper "
      "the same options, on all ranks",
      [](const ProcessGroup& group) {
        const auto net = std::make_shared<Layers>();
        if (group.rank() == 1) fully_shard(net->layers[0]);
        return told([&] { const Sharded model(net, group); });
      });
}

TEST(ShardedMisuse, RanksCallOtherUnits) {
  expect_sentence(
      "FullyShardedDataParallel, rank {rank}: the ranks use different units: rank 0 uses "
      "\"layer0\" in forward(), rank 1 uses \"layer1\" in forward(). Call the same units in the "
      "same order on all ranks, and in an evaluation give all ranks the same number of batches",
      [](const ProcessGroup& group) {
        const auto net = std::make_shared<Layers>();
        Sharded model{net, group, every_layer()};
        if (group.rank() == 1) net->order = {1, 0};
        return told([&] { backward(model, group); });
      });
}

TEST(ShardedMisuse, ASecondBackward) {
  expect_sentence(
      "FullyShardedDataParallel, rank {rank}: a second backward() through one forward; the "
      "gradients of the first were reduced already. Add the losses and call backward() once, or "
      "hold no_sync() during all but the last",
      [](const ProcessGroup& group) {
        Sharded model{std::make_shared<Layers>(), group, every_layer()};
        const Tensor loss = model(rows_of(group)).sum();
        loss.backward({}, /*retain_graph=*/true);
        return told([&] { loss.backward(); });
      });
}

TEST(ShardedMisuse, AListOfShardsIsClipped) {
  expect_sentence(
      "clip_grad_norm_: parameter 0 of 4 in the list is this rank's shard of "
      "\"layer0.linear.weight\", of unit \"layer0\" of FullyShardedDataParallel (rank {rank} of "
      "the "
      "2 that divide it), so the list has other gradients on each rank, and the ranks would come "
      "to different results. Call clip_grad_norm_(model, max_norm) with the wrapper or the "
      "pipeline that made the shards. For a module that parallelize_module() has divided, also "
      "within DistributedDataParallel, call clip_grad_norm_(records, max_norm) with the records "
      "that parallelize_module() returned",
      [](const ProcessGroup& group) {
        Sharded model{std::make_shared<Layers>(), group, every_layer()};
        backward(model, group);
        return told([&] { clip_grad_norm_(model.parameters(), 1.0); });
      });
}

TEST(ShardedMisuse, AListOfShardsIsUnscaled) {
  expect_sentence(
      "GradScaler::unscale_: parameter 0 of 4 in the list is this rank's shard of "
      "\"layer0.linear.weight\", in bucket 0 of DistributedDataParallel (rank {rank} of the 2 that "
      "divide it), so the list has other gradients on each rank, and the ranks would come to "
      "different results. Call GradScaler::unscale_(model) with the wrapper or the pipeline that "
      "made the shards. For a module that parallelize_module() has divided, also within "
      "DistributedDataParallel, call GradScaler::unscale_(records) with the records that "
      "parallelize_module() returned",
      [](const ProcessGroup& group) {
        Replicated model{
            std::make_shared<Layers>(), group, {.gradients = GradientPlacement::kSharded}};
        ZeroRedundancyOptimizer<SGD> optimizer{model, torch::optim::SGDOptions(0.1)};
        backward(model, group);
        GradScaler scaler;
        return told([&] { scaler.unscale_(optimizer.param_groups()[0].params()); });
      });
}

TEST(ShardedMisuse, AStepWithGradientsThatNobodyReduced) {
  expect_sentence(
      "ZeroRedundancyOptimizer of cadre::AdamW, rank {rank}: ranks 0 and 1 have different "
      "gradients of \"layer0.linear.weight\". With whole gradients they must be reduced before "
      "step(): run the model through DistributedDataParallel, or reduce them in the same way on "
      "all ranks",
      [](const ProcessGroup& group) {
        Layers net;
        ZeroRedundancyOptimizer<AdamW> optimizer(net.named_parameters(), group,
                                                 torch::optim::AdamWOptions(0.1));
        net.forward(rows_of(group)).sum().backward();
        return told([&] { optimizer.step(); });
      });
}

TEST(ShardedMisuse, ASnapshotOfAnotherModel) {
  const testing::TemporaryFolder folder;
  SnapshotFolder run(folder.path());
  nn::Linear other(4, 4);
  save_sharded(run, 1, parts_of(*other));
  expect_sentence(
      "rank 0: " + run.path_of(1) +
          " has no tensor 'layer0.linear.bias', which the model needs (4 are missing); its 2 "
          "tensors have other names, such as 'bias', so another model has saved it. Load it into "
          "a model with these names, or pass the path of what this model has saved",
      [&](const ProcessGroup& group) {
        const auto net = std::make_shared<Layers>();
        const Sharded model{net, group, every_layer()};
        return told(
            [&] { load_sharded(run.path_of(1), parts_of(model.parameter_shards(), *net), group); });
      });
}

TEST(ShardedMisuse, TheStateOfADividedOptimizer) {
  expect_sentence(
      "a snapshot cannot hold the state of cadre::ZeroRedundancyOptimizer<cadre::SGD>; expected "
      "Adam, AdamW, SGD, RMSprop, Adagrad or Adadelta. For a cadre::ZeroRedundancyOptimizer pass "
      "local_optimizer(), with the parts of its parameter_shards()",
      [](const ProcessGroup& group) {
        Replicated model{std::make_shared<Layers>(), group};
        ZeroRedundancyOptimizer<SGD> optimizer{model, torch::optim::SGDOptions(0.1)};
        const auto parts = parts_of(optimizer.parameter_shards(), *model.module());
        return told([&] { state_dict(optimizer, parts.parameters); });
      });
}

}  // namespace
}  // namespace cadre
