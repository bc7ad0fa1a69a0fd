// Tests the memory of sharded gradients: how many whole gradients exist at a time, in which buffers
// they are reduced, and when a buffer is reused.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/flat_parameters.h"
#include "cadre/testing/torch/ddp_copies.h"
#include "cadre/testing/torch/group_fakes.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers

// A module of 12 layers, each with its own bucket.
struct Deep : nn::Module {
  Deep() {
    torch::manual_seed(3);
    for (int i = 0; i < kNumLayers; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(kWidth, kWidth)));
    }
  }
  Tensor forward(Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  static constexpr int kNumLayers = 12;
  static constexpr int64_t kWidth = 8;
  std::vector<nn::Linear> layers;
};

constexpr int64_t kLayerBytes = 4 * (Deep::kWidth * Deep::kWidth + Deep::kWidth);

// Delays each reduce_scatter, so that reductions take longer than a backward.
void slow_down(const FakeGroup& group) {
  group.on_call = [&group](GroupCall& call) {
    if (call.kind == OpKind::kReduceScatter) {
      group.delay(call);
    } else {
      call.pass_on();
    }
  };
}

// Returns the sizes of the flat buffers that the group has allocated, in float32 elements.
std::vector<int64_t> allocated_by(const FakeGroup& group) {
  constexpr std::string_view kBegin = "allocate_symmetric(uint8 x ";
  std::vector<int64_t> numels;
  for (const std::string& call : group.log()) {
    if (!call.starts_with(kBegin)) continue;
    numels.push_back(std::stoll(call.substr(kBegin.size())) / int64_t{sizeof(float)});
  }
  return numels;
}

// Whole gradients may exist for one bucket at a time. The reductions must use two buffers, however
// slow they are, and a buffer must not be written before its reduction has ended.
TEST(DdpSharded, FewFullGradientsExistAtATime) {
  std::vector<std::shared_ptr<Deep>> nets;
  for (int i = 0; i < 4; ++i) nets.push_back(std::make_shared<Deep>());
  const auto result = run_groups(2, [&nets](const ProcessGroup& group) {
    const auto net = nets[group.rank()];
    const auto reference_net = nets[2 + group.rank()];
    const FakeGroup replicas(group);
    slow_down(replicas);
    DistributedDataParallelOptions options{
        .bucket_caps = {.first_bytes = kLayerBytes, .bytes = kLayerBytes}};
    DistributedDataParallel reference{reference_net, group, options};
    options.gradients = GradientPlacement::kSharded;
    DistributedDataParallel model{net, replicas.group(), options};
    const std::vector<int64_t> allocated = allocated_by(replicas);
    require(shard::WrapperAccess::flat_parameters(model).size() == Deep::kNumLayers,
            "a bucket for each layer");
    const int64_t of_layer = shard::WrapperAccess::flat_parameters(model)[0]->layout().numel();
    require(std::ranges::count(allocated, of_layer) == Deep::kNumLayers + 2,
            format("{} buffers of {} elements", std::ranges::count(allocated, of_layer), of_layer));
    require(std::ssize(allocated) == Deep::kNumLayers + 2 + 1, "and the trailer");
    size_t most = 0;
    for (Tensor& parameter : net->parameters()) {
      parameter.register_hook([&](const Tensor&) {
        size_t num_full = 1;  // 1: the gradient that is about to be accumulated
        for (const Tensor& each : net->parameters()) num_full += has_values(each.grad()) ? 1 : 0;
        most = std::max(most, num_full);
      });
    }
    for (int step = 0; step < 3; ++step) {
      const Tensor x =
          torch::full({2, Deep::kWidth}, 0.1F * static_cast<float>(group.rank() + step));
      model(x).sum().backward();
      reference(x).sum().backward();
      require(most <= 2, format("{} full gradients at once", most));  // 2: a weight and a bias
      for (const auto& flat : shard::WrapperAccess::flat_parameters(model)) {
        for (size_t i = 0; i < flat->parameters().size(); ++i) {
          const Tensor whole = reference_net->named_parameters()[flat->parameters()[i].name].grad();
          const FlatRange range = flat->layout().range(i, group.rank());
          require(
              equal_bits(whole.flatten().slice(0, range.begin, range.end), flat->values(i).grad()),
              flat->parameters()[i].name);
          Tensor values = flat->values(i);
          values.mutable_grad().reset();
        }
      }
      reference_net->zero_grad();
    }
    require(allocated_by(replicas) == allocated, "nothing more was allocated");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A module of four parameters of different sizes, each in its own bucket. forward() uses them in
// the order `order`.
struct Branches : nn::Module {
  Branches() {
    for (int64_t i = 0; i < 4; ++i) {
      weights.push_back(
          register_parameter(std::to_string(i), torch::ones({40 * (i + 1)}, torch::kDouble)));
    }
  }
  Tensor forward(const Tensor& x, const std::vector<size_t>& order) {
    Tensor sum = torch::zeros({}, torch::kDouble);
    for (const size_t i : order) sum = sum + (x * weights[i]).sum();
    return sum;
  }
  std::vector<Tensor> weights;
};

// Gradients become ready in another order on each rank and in each step. All ranks must
// nevertheless reduce the buckets in the same order.
TEST(DdpSharded, AllRanksReduceInOneOrder) {
  constexpr int kNumRanks = 3;
  std::vector<std::vector<std::string>> logs(kNumRanks);
  const auto result = run_groups(kNumRanks, [&logs](const ProcessGroup& group) {
    const FakeGroup replicas(group);
    slow_down(replicas);
    const auto net = std::make_shared<Branches>();
    DistributedDataParallel model{
        net,
        replicas.group(),
        {.bucket_caps = {.first_bytes = 8, .bytes = 8}, .gradients = GradientPlacement::kSharded}};
    require(shard::WrapperAccess::flat_parameters(model).size() == 4,
            "a bucket for each parameter");
    replicas.clear_log();
    std::vector<size_t> order = {0, 1, 2, 3};
    for (int step = 0; step < 4; ++step) {
      std::ranges::rotate(order, order.begin() + (group.rank() + step) % 4);
      if (group.rank() == 1) std::ranges::reverse(order);
      std::vector<size_t> used = order;
      // Rank 2 does not use the last parameter of its order.
      if (step == 2 && group.rank() == 2) used.pop_back();
      model(torch::full({1}, 1.0 + group.rank(), torch::kDouble), used).backward();
      for (const auto& flat : shard::WrapperAccess::flat_parameters(model)) {
        const Tensor& gradient = flat->values(0).grad();
        const bool is_left_out =
            step == 2 && flat->parameters()[0].tensor.is_same(net->weights[order.back()]);
        if (group.rank() == 2 && is_left_out) {
          require(torch::equal(gradient, torch::ones_like(gradient)),
                  "without rank 2: (1 + 2) / 3");
        }
        if (step != 2) require(torch::equal(gradient, torch::full_like(gradient, 2)), "the mean");
      }
      model.zero_grad();
    }
    logs[group.rank()] = replicas.log();
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  EXPECT_GT(logs[0].size(), 4 * 5U);
  for (int rank = 1; rank < kNumRanks; ++rank) EXPECT_EQ(logs[rank], logs[0]) << "rank " << rank;
}

}  // namespace
}  // namespace cadre
