// Tests deferred modules (cadre::defer_init) under FullyShardedDataParallel. All ranks must get the
// values with which rank 0 would have constructed the module, bit for bit, and the construction
// must need no more memory than the shards and one unit.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/testing/torch/fsdp_tower.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers

// The ranks are threads that share the default random generator, so they construct their modules
// one after the other, under this mutex.
std::mutex& construction() {
  static std::mutex mutex;
  return mutex;
}

template <typename Make>
auto constructed(uint64_t seed, const Make& make) {
  const std::lock_guard<std::mutex> lock(construction());
  torch::manual_seed(seed);
  return make();
}

template <typename Make>
auto deferred(uint64_t seed, const Make& make) {
  return constructed(seed, [&] { return defer_init(make); });
}

void expect_same(const Snapshot& got, const Snapshot& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i])) << "tensor " << i;
}

Snapshot copies_of(const std::vector<Tensor>& tensors) {
  Snapshot copies;
  for (const Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

// A transformer with everything that a deferred module must replay: several kinds of layers, units,
// a tied weight, a buffer and an initialization with apply().
struct TiedHead : nn::Module {
  explicit TiedHead(const Tensor& tied) : weight(register_parameter("weight", tied)) {}
  Tensor weight;
};

struct DeferredGpt : UnitGpt {
  DeferredGpt() {
    head = register_module("head", std::make_shared<TiedHead>(tokens->weight));
    attention->norm->weight.set_requires_grad(false);
    register_buffer("scale", torch::linspace(0, 1, 8).exp());
    statistics = register_module("statistics", nn::BatchNorm1d(8));
    apply([](nn::Module& module) {
      const torch::NoGradGuard no_grad;
      if (auto* linear = module.as<nn::Linear>()) nn::init::normal_(linear->weight, 0.0, 0.02);
    });
  }
  std::shared_ptr<TiedHead> head;
  nn::BatchNorm1d statistics{nullptr};
};

TEST(FsdpDeferred, AllRanksGetTheBitsOfPlainConstructionOnRank0) {
  const auto make = [] { return std::make_shared<DeferredGpt>(); };
  const auto plain = constructed(7, make);
  const Snapshot expected = copies_of(parameters_of(*plain));
  for (int world_size = 1; world_size <= 4; ++world_size) {
    const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
      const auto gpt = deferred(7 + static_cast<uint64_t>(group.rank()), make);
      FullyShardedDataParallel model{gpt, group, every_unit()};
      expect_same(assembled_parameters(model, group), expected);
      expect_same(gpt->buffers(), plain->buffers());
      for (const Tensor& tensor : gpt->parameters()) EXPECT_TRUE(tensor.is_cpu());
      EXPECT_TRUE(gpt->head->weight.is_same(gpt->tokens->weight));
      EXPECT_FALSE(gpt->attention->norm->weight.requires_grad());
    });
    EXPECT_TRUE(result.ok()) << world_size << " ranks: " << result.failures();
  }
}

TEST(FsdpDeferred, TrainsAsFromPlainConstruction) {
  for (const char* name : {"mlp", "cnn", "gpt"}) {
    const Case test_case{.model = name, .optimizer = "adamw", .batch = 6, .dtype = torch::kFloat};
    const auto make = [&]() -> std::shared_ptr<Model> {
      if (test_case.model == "mlp") return std::make_shared<UnitMlp>();
      if (test_case.model == "cnn") return std::make_shared<UnitCnn>(torch::kFloat);
      return std::make_shared<UnitGpt>();
    };
    std::vector<Training> trainings;
    const std::vector<Tensor> batches = constructed(5, [&] {
      const auto model = make();
      return std::vector<Tensor>{model->make_batch(6), model->make_batch(6)};
    });
    for (const bool is_deferred : {false, true}) {
      trainings.emplace_back();
      const auto result = run_groups(2, [&](const ProcessGroup& group) {
        const auto module = is_deferred ? deferred(7, make) : constructed(7, make);
        Training training =
            train_sharded_rank(test_case, batches, group, module, all_units(test_case, 2));
        if (group.rank() == 0) trainings.back() = std::move(training);
      });
      ASSERT_TRUE(result.ok()) << name << ": " << result.failures();
    }
    expect_same(trainings[1].parameters, trainings[0].parameters);
  }
}

TEST(FsdpDeferred, RanksMayConstructDifferently) {
  const auto make = [] { return std::make_shared<UnitGpt>(); };
  const Snapshot expected = copies_of(parameters_of(*constructed(7, make)));
  for (const int plain_rank : {0, 1}) {
    const auto result = run_groups(2, [&](const ProcessGroup& group) {
      const uint64_t seed = group.rank() == 0 ? 7 : 8;
      const auto gpt = group.rank() == plain_rank ? constructed(seed, make) : deferred(seed, make);
      FullyShardedDataParallel model{gpt, group, every_unit()};
      expect_same(assembled_parameters(model, group), expected);
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(FsdpDeferred, OtherPrecisionsIgnoredParametersAndTwoAxes) {
  const auto make = [] { return std::make_shared<DeferredGpt>(); };
  const auto plain = constructed(7, make);
  const auto result = run_groups(4, [&](const ProcessGroup& group) {
    const auto gpt = deferred(7, make);
    auto options = every_unit();
    options.ignored = {"positions"};
    options.precision.parameters = torch::kBFloat16;
    FullyShardedDataParallel model{gpt, DeviceMesh(group, {{"replicate", 2}, {"shard", 2}}),
                                   options};
    EXPECT_TRUE(gpt->positions->weight.equal(plain->positions->weight));
    const auto full = model.summon_full_params();
    EXPECT_TRUE(
        gpt->feed_forward->up->weight.equal(plain->feed_forward->up->weight.to(torch::kBFloat16)));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpDeferred, RefusesMetaTensorsOfTheProgram) {
  const auto result = run_groups(2, [](const ProcessGroup& group) {
    const auto options = torch::TensorOptions().device(torch::kMeta);
    auto net = std::make_shared<nn::Module>();
    net->register_parameter("weight", torch::empty({3}, options));
    try {
      const parallel::FullyShardedCore core(net, parallel::ShardGroups::of(group), {});
      ADD_FAILURE() << "was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.message(),
                "FullyShardedDataParallel: \"weight\" is on the meta device, but was not made by "
                "defer_init(), so its values are not known. Construct the module inside "
                "cadre::defer_init(), without a device");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Counts the bytes that are in use, and their peak.
struct Usage {
  std::atomic<int64_t> now{0};
  std::atomic<int64_t> peak{0};

  void add(int64_t num_bytes) {
    const int64_t used = now.fetch_add(num_bytes) + num_bytes;
    int64_t highest = peak;
    while (highest < used && !peak.compare_exchange_weak(highest, used)) {
    }
  }
};

// While an object of this class exists, it counts all memory that libtorch allocates on the CPU, in
// all threads.
class CountedMemory final : public c10::Allocator {
 public:
  explicit CountedMemory(int64_t large_bytes)
      : plain_(c10::GetCPUAllocator()), large_bytes_(large_bytes) {
    c10::SetCPUAllocator(this, kPriority);
  }
  ~CountedMemory() override { c10::SetCPUAllocator(plain_, kPriority); }

  at::DataPtr allocate(size_t num_bytes) override {
    const auto counted = static_cast<int64_t>(num_bytes);
    auto block = std::make_unique<Block>(Block{plain_->allocate(num_bytes), counted, {all_}});
    if (counted >= large_bytes_) block->counts.push_back(large_);
    for (const auto& count : block->counts) count->add(counted);
    void* const data = block->memory.get();
    return {data, block.release(), &free_block, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    default_copy_data(to, from, num_bytes);
  }

  const Usage& all() const { return *all_; }
  const Usage& large() const { return *large_; }  // only blocks of at least large_bytes

 private:
  static constexpr uint8_t kPriority = 100;
  struct Block {
    at::DataPtr memory;
    int64_t num_bytes;
    std::vector<std::shared_ptr<Usage>> counts;
  };
  static void free_block(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    for (const auto& count : block->counts) count->add(-block->num_bytes);
  }

  c10::Allocator* plain_;
  const int64_t large_bytes_;
  std::shared_ptr<Usage> all_ = std::make_shared<Usage>();
  std::shared_ptr<Usage> large_ = std::make_shared<Usage>();
};

// A model of 24 units, each with 8.4 MB of parameters: 200 MB in total.
struct LargeTower : nn::Module {
  LargeTower() {
    for (int i = 0; i < 24; ++i) {
      units.push_back(register_module("unit" + std::to_string(i), LinearUnit(kSide, kSide)));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor h = x;
    for (auto& unit : units) h = unit->forward(h);
    return h;
  }
  static constexpr int64_t kSide = 1448;
  static constexpr int64_t kUnitBytes = (kSide * kSide + kSide) * 4;
  std::vector<LinearUnit> units;
};

TEST(FsdpDeferred, ConstructionHoldsTheShardsAndOneUnit) {
  constexpr int kRanks = 2;
  constexpr int64_t kSmall = 1 << 20;
  // The size of the weight of one unit. A shard of a unit has half of this, so it does not count as
  // a large block.
  constexpr int64_t kWeightBytes = LargeTower::kSide * LargeTower::kSide * 4;
  const auto memory = std::make_unique<CountedMemory>(kWeightBytes);
  std::atomic<int64_t> shards{0};
  const auto result = run_groups(kRanks, [&](const ProcessGroup& group) {
    // The ranks defer their modules one after the other.
    const auto tower = deferred(7, [] { return std::make_shared<LargeTower>(); });
    EXPECT_LE(memory->all().peak, LargeTower::kUnitBytes + kSmall) << "while it is recorded";
    group.barrier();
    EXPECT_LE(memory->all().now, kSmall) << "deferred";
    group.barrier();
    FullyShardedDataParallel model{tower, group, every_unit()};
    for (const Tensor& values : model.parameters()) {
      shards += static_cast<int64_t>(values.nbytes());
    }
    group.barrier();
    // Each rank has had at most one whole weight at a time during the construction of the wrapper.
    EXPECT_EQ(memory->large().peak, kRanks * kWeightBytes);
    EXPECT_EQ(memory->large().now, 0) << "sharded";
    // The peak is the gradients of the shards and one unit for each rank. The shards themselves do
    // not count, because they are in shared memory.
    EXPECT_LE(memory->all().peak, shards + kRanks * LargeTower::kUnitBytes + kSmall);
    group.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
