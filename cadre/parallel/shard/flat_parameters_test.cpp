// Compares flat parameters on 1 to 8 ranks with the parameters from which they were made.
#include "cadre/parallel/shard/flat_parameters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/testing/torch/group_fakes.h"
#include "cadre/testing/torch/process_group_ranks.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using testing::failure_of;
using testing::FakeGroup;
using testing::GroupCall;
using ::testing::HasSubstr;
using testing::PeersFormula;
using testing::require;
using testing::run_groups;
using torch::Tensor;

constexpr int kWorldSizes[] = {1, 2, 3, 4, 8};

Tensor leaf(const Tensor& values) {
  return values.clone().requires_grad_(true);
}

// Returns parameters whose sizes are no multiples of each other. One is empty, one has one element,
// one is not contiguous.
std::vector<NamedTensor> make_parameters(torch::ScalarType dtype = torch::kFloat) {
  auto numbers = [dtype, next = 1.0](torch::IntArrayRef sizes) mutable {
    const Tensor values =
        torch::arange(next, next + static_cast<double>(c10::multiply_integers(sizes)));
    next += 100;
    return values.view(sizes).to(dtype);
  };
  Tensor transposed = numbers({3, 5}).t().requires_grad_(true);
  return {{"weight", leaf(numbers({7, 3}))},
          {"scale", leaf(numbers({}))},
          {"nothing", leaf(numbers({0, 4}))},
          {"transposed", transposed},
          {"frozen", numbers({11})}};
}

std::vector<Tensor> copies_of(const std::vector<NamedTensor>& parameters) {
  std::vector<Tensor> copies;
  for (const NamedTensor& parameter : parameters) {
    copies.push_back(parameter.tensor.detach().clone(at::MemoryFormat::Contiguous));
  }
  return copies;
}

ProcessGroup formula_of(int world_size) {
  return FakeGroup(std::make_shared<PeersFormula>(world_size)).group();
}

void require_values(const std::vector<NamedTensor>& parameters, const std::vector<Tensor>& values,
                    const std::string& where) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& parameter = parameters[i].tensor;
    require(parameter.is_contiguous(), where + ": contiguous");
    require(torch::equal(parameter, values[i]), where + ": " + parameters[i].name);
  }
}

TEST(FlatParameters, GatherWhatWasShardedOnAnyNumberOfRanks) {
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16}) {
    for (const int world_size : kWorldSizes) {
      const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
        const auto parameters = make_parameters(dtype);
        const auto values = copies_of(parameters);
        shard::FlatParameters flat(parameters, group, {.alignment = 4});
        require(flat.shard().scalar_type() == dtype, "dtype");
        require(flat.shard().numel() == flat.layout().shard_numel(), "size of the shard");
        for (int round = 0; round < 3; ++round) {
          require(!flat.is_unsharded(), "sharded");
          flat.unshard_async();
          flat.wait_unsharded();
          require(flat.is_unsharded(), "unsharded");
          require_values(parameters, values, "gathered");
          flat.reshard();
        }
        for (size_t i = 0; i < parameters.size(); ++i) {
          const FlatRange range = flat.layout().range(i, group.rank());
          const Tensor& part = flat.values(i);
          require(torch::equal(part, values[i].flatten().slice(0, range.begin, range.end)),
                  "own part of " + parameters[i].name);
          require(part.is_leaf() && part.requires_grad() == parameters[i].tensor.requires_grad(),
                  "a leaf");
        }
      });
      EXPECT_TRUE(result.ok()) << world_size << " ranks: " << result.failures();
    }
  }
}

// Each rank changes its own shard. After the next gather all ranks must see the changes of all
// ranks.
TEST(FlatParameters, ChangesOfTheShardsArriveEverywhere) {
  for (const bool keep_full : {false, true}) {
    for (const auto compute : {torch::kFloat, torch::kBFloat16}) {
      for (const int world_size : kWorldSizes) {
        const auto result = run_groups(world_size, [&](const ProcessGroup& group) {
          const auto parameters = make_parameters();
          auto values = copies_of(parameters);
          shard::FlatParameters flat(
              parameters, group,
              {.compute_dtype = compute, .alignment = 1, .keep_full = keep_full});
          require(flat.is_unsharded() == keep_full, "whole from the start");
          const torch::NoGradGuard no_grad;
          for (size_t i = 0; i < parameters.size(); ++i) {
            flat.values(i).mul_(3);
            values[i] = (values[i] * 3).to(compute);
          }
          flat.mark_stale();
          require(!flat.is_unsharded(), "stale");
          flat.unshard_async();
          flat.unshard_async();  // has no effect, because a gather is in flight
          flat.wait_unsharded();
          require_values(parameters, values, "changed");
          require(flat.shard().scalar_type() == torch::kFloat, "the master's dtype");
        });
        EXPECT_TRUE(result.ok()) << world_size << " ranks: " << result.failures();
      }
    }
  }
}

TEST(FlatParameters, AParameterKeepsWhatItIs) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    Tensor weight = leaf(torch::ones({4, 3}));
    const Tensor alias = weight;
    int num_hooks = 0;
    weight.register_hook([&](const Tensor&) { ++num_hooks; });
    weight.mutable_grad() = torch::full({4, 3}, 2.0);
    shard::FlatParameters flat({{"weight", weight}}, group, {});
    flat.unshard_async();
    flat.wait_unsharded();
    require(alias.is_same(weight) && weight.requires_grad() && weight.is_leaf(), "identity");
    (weight * 5).sum().backward();
    require(torch::equal(weight.grad(), torch::full({4, 3}, 7.0)), "the gradient adds up");
    require(num_hooks == 1, "hooks");
    flat.reshard();
    require(weight.sizes() == torch::IntArrayRef({4, 3}), "sizes while sharded");
    require(torch::equal(weight.grad(), torch::full({4, 3}, 7.0)), "the gradient stays");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A small network with its parameters. Each test shards the parameters itself, or uses a network
// without sharding as the reference.
struct Unit {
  Unit() {
    linear = torch::nn::Linear(4, 5);
    norm = torch::nn::LayerNorm(torch::nn::LayerNormOptions({5}));
    linear->to(torch::kDouble);
    norm->to(torch::kDouble);
    parameters = {{"weight", linear->weight},
                  {"bias", linear->bias},
                  {"norm.weight", norm->weight},
                  {"norm.bias", norm->bias}};
    // The values are not random, because the ranks are threads and share one generator: they would
    // get different values.
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Tensor& tensor = parameters[i].tensor;
      const auto first = static_cast<double>(i) - 1.5;
      tensor.copy_(
          torch::sin(torch::arange(tensor.numel(), torch::kDouble) + first).view_as(tensor));
    }
  }
  Tensor loss() { return torch::gelu(norm(linear(input))).pow(2).sum(); }
  std::vector<Tensor> gradients() const {
    std::vector<Tensor> gradients;
    for (const NamedTensor& parameter : parameters) gradients.push_back(parameter.tensor.grad());
    gradients.push_back(input.grad());
    return gradients;
  }

  Tensor input = leaf(torch::linspace(-1, 1, 12, torch::kDouble).view({3, 4}));
  torch::nn::Linear linear{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  std::vector<NamedTensor> parameters;
};

bool all_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

TEST(FlatParameters, ABackwardGoesThroughABufferThatWasFreedAndFilledAgain) {
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    Unit alone;
    alone.loss().backward();
    Unit unit;
    shard::FlatParameters flat(unit.parameters, group, {});
    flat.unshard_async();
    flat.wait_unsharded();
    const uint32_t version = unit.linear->weight._version();
    Tensor loss = unit.loss();
    flat.reshard();
    const std::string failure = failure_of([&] { loss.backward({}, /*retain_graph=*/true); });
    require(failure.find("are sharded") != std::string::npos, failure);
    unit.input.mutable_grad().reset();
    for (const NamedTensor& parameter : unit.parameters) parameter.tensor.mutable_grad().reset();
    flat.unshard_async();
    flat.wait_unsharded();
    require(unit.linear->weight._version() == version, "the version counter stays");
    loss.backward();
    require(all_equal(unit.gradients(), alone.gradients()), "gradients");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The test above proves something only if the backward reads the memory that the second gather has
// filled. Here this memory is zeroed before the backward, and the gradients must differ.
TEST(FlatParameters, ABackwardThroughOtherValuesGivesOtherGradients) {
  Unit alone;
  alone.loss().backward();
  Unit unit;
  shard::FlatParameters flat(unit.parameters, formula_of(1), {});
  flat.unshard_async();
  flat.wait_unsharded();
  Tensor loss = unit.loss();
  flat.reshard();
  flat.unshard_async();
  flat.wait_unsharded();
  for (const NamedTensor& parameter : unit.parameters) {
    parameter.tensor.data().zero_();  // does not change the version counter
  }
  loss.backward();
  EXPECT_FALSE(all_equal(unit.gradients(), alone.gradients()));
}

// Shards are changed between forward and backward, and autograd must throw. is_told: the change
// bypasses autograd's version counters, and gather_changed() is called instead.
TEST(FlatParameters, ABackwardThroughAForwardBeforeAChangeIsRefused) {
  for (const auto& [keep_full, is_told] :
       {std::pair(false, false), {true, false}, {false, true}, {true, true}}) {
    const auto result = run_groups(2, [&, keep = keep_full, told = is_told](const auto& group) {
      Unit unit;
      const auto flat = std::make_shared<shard::FlatParameters>(
          unit.parameters, group, shard::FlatParametersOptions{.keep_full = keep});
      flat->unshard_async();
      if (!keep) flat->wait_unsharded();
      Tensor loss = unit.loss();
      for (size_t i = 0; i < unit.parameters.size(); ++i) {
        const torch::NoGradGuard no_grad;
        told ? flat->values(i).variable_data().add_(1) : flat->values(i).add_(1);
      }
      if (told) shard::gather_changed(std::span(&flat, 1));
      if (!told) flat->mark_stale();
      flat->unshard_async();
      flat->wait_unsharded();
      const std::string failure = failure_of([&] { loss.backward(); });
      require(failure.find("modified by an inplace operation") != std::string::npos, failure);
    });
    EXPECT_TRUE(result.ok()) << keep_full << is_told << ": " << result.failures();
  }
}

TEST(FlatParameters, TouchingWhatIsNotThereThrowsASentence) {
  Unit unit;
  const Tensor weight = unit.linear->weight;
  {
    const auto group = formula_of(2);
    shard::FlatParameters flat(
        unit.parameters, group,
        {.name = "of unit \"blocks.3\"", .remedy = "read them inside summon_full_params()"});
    const auto sharded =
        AllOf(HasSubstr("The values of parameters of unit \"blocks.3\" are sharded"),
              HasSubstr("To use them, read them inside summon_full_params()"));
    const torch::NoGradGuard no_grad;
    EXPECT_THAT(failure_of([&] { unit.loss(); }), sharded);
    EXPECT_THAT(failure_of([&] { weight.sum(); }), sharded);
    EXPECT_THAT(failure_of([&] { weight.clone(); }), sharded);
    EXPECT_THAT(failure_of([&] { weight.zero_(); }), sharded);
    EXPECT_THAT(failure_of([&] { weight.t().contiguous(); }), sharded);
    EXPECT_THAT(failure_of([&] { torch::nn::init::normal_(weight); }), sharded);
    EXPECT_THAT(failure_of([&] { (void)weight.data_ptr(); }), sharded);
    EXPECT_THAT(failure_of([&] { (void)weight[0][0].item<double>(); }), sharded);
    flat.unshard_async();
    EXPECT_THAT(failure_of([&] { weight.sum(); }),
                HasSubstr("are being gathered from the other ranks. To use"));
    flat.wait_unsharded();
    weight.sum();
    flat.mark_stale();
    EXPECT_THAT(failure_of([&] { weight.sum(); }),
                HasSubstr("have changed on the ranks that own them"));
    flat.reshard();
    EXPECT_THAT(failure_of([&] { weight.sum(); }), sharded);
  }
  EXPECT_THAT(failure_of([&] { weight.sum(); }), HasSubstr("are sharded"));
}

TEST(FlatParameters, KeepTheirValuesAfterTheWrapper) {
  const auto parameters = make_parameters();
  const auto values = copies_of(parameters);
  {
    shard::FlatParameters flat(parameters, formula_of(1), {});
    flat.unshard_async();
    flat.wait_unsharded();
  }
  require_values(parameters, values, "afterwards");
}

TEST(FlatParameters, UnitsTakeTurnsInTheMemoryOfAPool) {
  const auto group = formula_of(2);
  const auto pool = std::make_shared<shard::FlatBufferPool>();
  std::vector<std::unique_ptr<shard::FlatParameters>> units;
  std::vector<Tensor> weights;
  for (const int64_t numel : {128, 128, 128, 64}) {
    weights.push_back(leaf(torch::ones({numel})));
    units.push_back(std::make_unique<shard::FlatParameters>(
        std::vector<NamedTensor>{{"weight", weights.back()}}, group,
        shard::FlatParametersOptions{.pool = pool}));
  }
  const auto unshard = [&](size_t i) {
    units[i]->unshard_async();
    units[i]->wait_unsharded();
    return weights[i].const_data_ptr();
  };
  EXPECT_EQ(pool->used_bytes(), 0);
  const void* first = unshard(0);
  const void* second = unshard(1);
  EXPECT_NE(first, second);
  units[0]->reshard();
  EXPECT_EQ(pool->kept_bytes(), 512);
  EXPECT_EQ(unshard(2), first);
  EXPECT_EQ(pool->kept_bytes(), 0);
  units[1]->reshard();
  units[2]->reshard();
  unshard(3);  // needs more memory, so some of the kept buffers are freed
  EXPECT_EQ(pool->used_bytes(), 256);
  EXPECT_EQ(pool->kept_bytes(), 512);
  EXPECT_EQ(pool->peak_bytes(), 1024);
}

// Rank 1 is lost during a gather. The gather must fail, the parameters must have no values, and the
// pool must not reuse the buffer.
TEST(FlatParameters, AGatherThatFailsLeavesThemSharded) {
  for (const bool keep_full : {false, true}) {
    const FakeGroup group(std::make_shared<PeersFormula>(2));
    Unit unit;
    const auto pool = std::make_shared<shard::FlatBufferPool>();
    shard::FlatParameters flat(unit.parameters, group.group(),
                               {.keep_full = keep_full, .name = "of unit 7", .pool = pool});
    flat.mark_stale();
    group.on_call = [](GroupCall&) { throw Error(ErrorCode::kPeerLost, "rank 1 is gone"); };
    flat.unshard_async();
    EXPECT_THAT(failure_of([&] { flat.wait_unsharded(); }),
                AllOf(HasSubstr("gathering the parameters of unit 7, rank 0: "),
                      HasSubstr("rank 1 is gone")));
    EXPECT_FALSE(flat.is_unsharded());
    EXPECT_THAT(
        failure_of([&] { unit.loss(); }),
        HasSubstr(
            "of unit 7 are not available, because gathering them from the other ranks failed"));
    EXPECT_EQ(pool->used_bytes() + pool->kept_bytes(), 0);
    group.group().close();  // an operation on a closed group throws when it is issued
    EXPECT_THAT(failure_of([&] { flat.unshard_async(); }), HasSubstr("rank 1 is gone"));
    EXPECT_THAT(failure_of([&] { unit.loss(); }), HasSubstr("are not available"));
    EXPECT_EQ(pool->used_bytes(), 0);
  }
}

TEST(FlatParameters, APeerThatLeavesDuringTheGatherIsAnError) {
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    Unit unit;
    shard::FlatParameters flat(unit.parameters, group, {.name = "of unit 7"});
    if (group.rank() == 1) {
      group.abort("test");
      return;
    }
    const std::string failure = failure_of([&] {
      flat.unshard_async();
      flat.wait_unsharded();
    });
    require(!failure.empty(), "an error");
    require(failure_of([&] { unit.loss(); }).find("of unit 7 are") != std::string::npos, failure);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FlatParameters, TakeWhatTheProgramWroteIntoTheParameters) {
  for (const bool keep_full : {false, true}) {
    const auto result = run_groups(3, [&](const ProcessGroup& group) {
      const auto parameters = make_parameters();
      shard::FlatParameters flat(parameters, group, {.keep_full = keep_full});
      if (!keep_full) {
        require(failure_of([&] { flat.take_from_parameters(); }).find("needs the whole") !=
                    std::string::npos,
                "sharded");
      }
      flat.unshard_async();
      flat.wait_unsharded();
      const torch::NoGradGuard no_grad;
      for (const NamedTensor& parameter : parameters) parameter.tensor.mul_(2);
      const auto values = copies_of(parameters);
      flat.take_from_parameters();
      require(flat.is_unsharded(), "still whole");
      if (!keep_full) flat.reshard();
      flat.mark_stale();
      flat.unshard_async();
      flat.wait_unsharded();
      require_values(parameters, values, "written");
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

TEST(FlatParameters, SayWhatEachRankOwns) {
  const auto result = run_groups(4, [&](const ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"replicate", 2}, {"shard", 2}});
    const auto parameters = make_parameters();
    const auto values = copies_of(parameters);
    shard::FlatParameters flat(parameters, mesh.group("shard"), {});
    const auto shards = flat.parameter_shards(mesh, "shard");
    require(shards.size() == parameters.size(), "one for each");
    for (size_t i = 0; i < shards.size(); ++i) {
      std::vector<Tensor> parts = {torch::empty({0})};
      for (const Box& box : shard::boxes_of(shards[i])) {
        Tensor part = values[i];
        for (size_t dim = 0; dim < box.sizes.size(); ++dim) {
          part = part.narrow(static_cast<int64_t>(dim), box.offsets[dim], box.sizes[dim]);
        }
        parts.push_back(part.flatten());
      }
      require(torch::equal(torch::cat(parts), shards[i].values), shards[i].name);
      require(shards[i].parameter.is_same(parameters[i].tensor), "the plain parameter");
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

std::string refusal(std::vector<NamedTensor> parameters,
                    shard::FlatParametersOptions options = {}) {
  return failure_of([&] {
    shard::FlatParameters flat(std::move(parameters), formula_of(2), std::move(options));
  });
}

TEST(FlatParameters, RefuseWhatCannotBeSharded) {
  const Tensor weight = leaf(torch::ones({4, 3}));
  EXPECT_THAT(refusal({}), HasSubstr("the list of parameters is empty"));
  EXPECT_THAT(refusal({{"a", Tensor()}}), HasSubstr("\"a\" is undefined"));
  EXPECT_THAT(refusal({{"a", weight * 2}}), HasSubstr("\"a\" is the result of an operation"));
  EXPECT_THAT(refusal({{"a", torch::ones({2}, torch::kMeta)}}), HasSubstr("\"a\" is on meta"));
  EXPECT_THAT(refusal({{"a", torch::ones({2}).to_sparse()}}), HasSubstr("not dense"));
  EXPECT_THAT(refusal({{"a", weight}, {"b", leaf(torch::ones({2}, torch::kDouble))}}),
              HasSubstr("\"b\" is Double but the first parameter is Float"));
  EXPECT_THAT(refusal({{"a", torch::ones({2}, torch::kComplexFloat)}}),
              HasSubstr("the dtype ComplexFloat cannot be sent between ranks"));
  EXPECT_THAT(refusal({{"a", weight}, {"b", weight}}), HasSubstr("\"a\" and \"b\" are one tensor"));
  EXPECT_THAT(refusal({{"a", weight}, {"b", weight.detach().view(-1).narrow(0, 5, 3)}}),
              HasSubstr("\"a\" and \"b\" share memory"));
  weight.mutable_grad() = torch::ones({4, 3});
  EXPECT_THAT(refusal({{"a", weight}}, {.compute_dtype = torch::kBFloat16}),
              HasSubstr("\"a\" has a gradient in Float"));
  EXPECT_THAT(refusal({{"a", weight}}, {.alignment = 0}), HasSubstr("alignment of 0"));
  EXPECT_THAT(
      refusal({{"a", weight}}, {.reshard_group = formula_of(3)}),
      HasSubstr("the group to reshard onto has 3 ranks, which does not divide the 2 ranks"));
  weight.sum();  // does not throw, because the failed calls have not changed the parameter
  const Tensor both = torch::ones({6});
  EXPECT_EQ(refusal({{"a", both.narrow(0, 0, 3)}, {"b", both.narrow(0, 3, 3)}}), "");
}

TEST(FlatParameters, RefuseWhatIsShardedTwice) {
  const Tensor weight = leaf(torch::ones({4, 3}));
  shard::FlatParameters flat({{"weight", weight}}, formula_of(2), {});
  EXPECT_THAT(refusal({{"weight", weight}}), HasSubstr("has sharded them already"));
  EXPECT_THAT(failure_of([&] { flat.wait_unsharded(); }),
              HasSubstr("was called without a gather in flight"));
  flat.unshard_async();
  flat.wait_unsharded();
  const shard::FlatParameters thief({{"weight", weight}}, formula_of(2), {});
  EXPECT_THAT(failure_of([&] { flat.mark_stale(); }),
              HasSubstr("has written to \"weight\" while the parameters were gathered"));
  EXPECT_THAT(failure_of([&] { flat.unshard_async(); }),
              HasSubstr("\"weight\" has been given other memory"));
}

}  // namespace
}  // namespace cadre
