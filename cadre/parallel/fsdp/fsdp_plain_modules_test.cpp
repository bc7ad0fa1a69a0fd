// Compares FullyShardedDataParallel of modules that are no ShardUnits with training in one process:
// modules of libtorch and of a program, whose units a policy chooses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/collective/op.h"
#include "cadre/parallel/fsdp/fully_sharded_data_parallel.h"
#include "cadre/parallel/shard/sharded_optimizer.h"
#include "cadre/tensor/hooks/activations/activation_checkpoint.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/torch/fsdp_tower.h"

namespace cadre {
namespace {

using namespace testing;  // NOLINT: these tests use its helpers
using ::testing::HasSubstr;

constexpr int64_t kModelWidth = 8;
constexpr int64_t kTokens = 5;

// Returns (rows, kTokens, kWidth).
Tensor sequences(const Tensor& rows) {
  return torch::sin(rows.unsqueeze(1) * torch::arange(1, kTokens + 1, kDouble).view({1, -1, 1}));
}

template <typename Net>
std::shared_ptr<Net> prepared() {
  const auto net = std::make_shared<Net>();
  net->to(kDouble);
  set_values(*net);
  return net;
}

// A module of libtorch around which the program has layers of its own.
struct EncoderNet : nn::Module {
  EncoderNet() {
    inputs = register_module("inputs", nn::Linear(kWidth, kModelWidth));
    const auto layer = nn::TransformerEncoderLayerOptions(kModelWidth, 2)
                           .dropout(0.0)
                           .dim_feedforward(2 * kModelWidth);
    encoder =
        register_module("encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 3)));
    outputs = register_module("outputs", nn::Linear(kModelWidth, 1));
  }
  Tensor forward(const Tensor& rows) {
    return outputs(encoder(inputs(sequences(rows)).transpose(0, 1)).mean(0));
  }
  nn::Linear inputs{nullptr}, outputs{nullptr};
  nn::TransformerEncoder encoder{nullptr};
};

struct RecurrentNet : nn::Module {
  RecurrentNet() {
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(kWidth, 6).num_layers(2)));
    gru = register_module("gru", nn::GRU(nn::GRUOptions(6, 4).bidirectional(true)));
    head = register_module("head", nn::Linear(8, 1));
  }
  Tensor forward(const Tensor& rows) {
    const Tensor h = std::get<0>(lstm(sequences(rows).transpose(0, 1)));
    return head(std::get<0>(gru(h)).mean(0));
  }
  nn::LSTM lstm{nullptr};
  nn::GRU gru{nullptr};
  nn::Linear head{nullptr};
};

// A residual network of typed members, with a parameter of its own beside them.
struct ResidualNet : nn::Module {
  ResidualNet() {
    stem = register_module("stem", nn::Conv2d(nn::Conv2dOptions(1, 4, 3).padding(1)));
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(4, 4, 3).padding(1)));
    norm = register_module("norm", nn::GroupNorm(nn::GroupNormOptions(2, 4)));
    second = register_module("second", nn::Conv2d(nn::Conv2dOptions(4, 4, 3).padding(1)));
    head = register_module("head", nn::Linear(4, 1));
    scale = register_parameter("scale", torch::ones({4, 1, 1}));
  }
  Tensor forward(const Tensor& rows) {
    Tensor h = stem(sequences(rows).unsqueeze(1));
    for (int i = 0; i < 2; ++i) h = h + second(torch::tanh(norm(first(h)))) * scale;
    return head(h.mean({2, 3}));
  }
  nn::Conv2d stem{nullptr}, first{nullptr}, second{nullptr};
  nn::GroupNorm norm{nullptr};
  nn::Linear head{nullptr};
  Tensor scale;
};

// An encoder and a decoder, and an embedding whose weight is also that of the output.
struct TranslationNet : nn::Module {
  TranslationNet() {
    tokens = register_module("tokens", nn::Embedding(11, kModelWidth));
    const auto encoder_layer = nn::TransformerEncoderLayerOptions(kModelWidth, 2).dropout(0.0);
    encoder = register_module(
        "encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(
                       nn::TransformerEncoderLayerOptions(encoder_layer).dim_feedforward(8), 2)));
    const auto decoder_layer = nn::TransformerDecoderLayerOptions(kModelWidth, 2).dropout(0.0);
    decoder = register_module(
        "decoder", nn::TransformerDecoder(nn::TransformerDecoderOptions(
                       nn::TransformerDecoderLayerOptions(decoder_layer).dim_feedforward(8), 2)));
  }
  Tensor forward(const Tensor& rows) {
    const Tensor ids = (rows.abs() * 10).to(torch::kLong).clamp(0, 10).transpose(0, 1);
    const Tensor h = decoder(tokens(ids), encoder(tokens(ids)));
    return torch::log_softmax(torch::matmul(h, tokens->weight.t()), -1).mean(0);
  }
  nn::Embedding tokens{nullptr};
  nn::TransformerEncoder encoder{nullptr};
  nn::TransformerDecoder decoder{nullptr};
};

// Chooses modules that have parameters of their own.
bool has_own_parameters(const WrapCandidate& candidate) {
  return !candidate.module.parameters(/*recurse=*/false).empty();
}

FullyShardedDataParallelOptions leaves(Reshard reshard = Reshard::kAfterForward) {
  FullyShardedDataParallelOptions options;
  options.reshard = reshard;
  options.wrap_policy = has_own_parameters;
  return options;
}

FullyShardedDataParallelOptions layers() {
  FullyShardedDataParallelOptions options;
  options.wrap_policy =
      wrap_by_type<nn::TransformerEncoderLayerImpl, nn::TransformerDecoderLayerImpl>();
  return options;
}

TEST(FsdpOfPlainModules, ModulesOfLibtorchTrainAsPlain) {
  expect_trains_as_plain([] { return prepared<EncoderNet>(); }, layers());
  expect_trains_as_plain([] { return prepared<TranslationNet>(); }, layers());
  expect_trains_as_plain([] { return prepared<RecurrentNet>(); }, leaves());
}

TEST(FsdpOfPlainModules, EachModuleWithParametersCanBeAUnit) {
  for (const Reshard reshard :
       {Reshard::kAfterForward, Reshard::kAfterBackward, Reshard::kAfterReduction}) {
    SCOPED_TRACE(std::string(to_string(reshard)));
    expect_trains_as_plain([] { return prepared<ResidualNet>(); }, leaves(reshard));
    expect_trains_as_plain([] { return prepared<TranslationNet>(); }, leaves(reshard));
  }
  FullyShardedDataParallelOptions onto_group = leaves(Reshard::kOntoGroup);
  onto_group.reshard_group_size = 2;
  expect_trains_as_plain([] { return prepared<EncoderNet>(); }, onto_group, PlainSteps{}, {2, 4});
  FullyShardedDataParallelOptions without_prefetch = leaves();
  without_prefetch.num_prefetched = 0;
  expect_trains_as_plain([] { return prepared<EncoderNet>(); }, without_prefetch);
  FullyShardedDataParallelOptions one_unit;
  expect_trains_as_plain([] { return prepared<EncoderNet>(); }, one_unit);
}

TEST(FsdpOfPlainModules, AccumulatesAsPlain) {
  expect_trains_as_plain([] { return prepared<EncoderNet>(); }, layers(), Accumulation<false>{});
  expect_trains_as_plain([] { return prepared<EncoderNet>(); }, layers(), Accumulation<true>{});
  expect_trains_as_plain([] { return prepared<ResidualNet>(); }, leaves(Reshard::kAfterReduction),
                         Accumulation<false>{});
}

// Returns the module itself, or that of its wrapper.
template <typename Model>
auto& module_of(Model& model) {
  if constexpr (requires { model.no_sync(); }) {
    return *model.module();
  } else {
    return model;
  }
}

// Trains by a function of the program that calls the model as often as it likes.
struct RepeatedSteps {
  template <typename Model>
  void operator()(Model& model, const Tensor& rows) const {
    const Tensor first = model.forward(rows);
    const Tensor second = model.forward(rows * 2);
    (first * second).mean().backward();
  }
};

struct EvaluatingSteps {
  template <typename Model>
  void operator()(Model& model, const Tensor& rows) const {
    Tensor scale;
    {
      const torch::NoGradGuard no_grad;
      scale = model.forward(rows).abs().mean() + 1;
    }
    model.forward(rows).pow(2).mean().backward();
    static_cast<void>(scale);
  }
};

TEST(FsdpOfPlainModules, SeveralForwardsAndEvaluationsTrainAsPlain) {
  expect_trains_as_plain([] { return prepared<EncoderNet>(); }, layers(), EvaluatingSteps{});
  expect_trains_as_plain([] { return prepared<ResidualNet>(); }, leaves(), EvaluatingSteps{});
  expect_trains_as_plain([] { return prepared<ResidualNet>(); }, leaves(), RepeatedSteps{}, {1, 2});
}

// A network whose layers are computed again in backward, two at a time.
struct RecomputedNet : nn::Module {
  RecomputedNet() {
    for (int i = 0; i < 4; ++i) {
      parts.push_back(register_module("part" + std::to_string(i), nn::Linear(kWidth, kWidth)));
    }
  }
  Tensor forward(const Tensor& rows) {
    const auto recomputed = [](auto forward, const Tensor& x) {
      return checkpoint(
          [forward](const std::vector<Tensor>& inputs) {
            return std::vector<Tensor>{forward(inputs[0])};
          },
          {x})[0];
    };
    Tensor h = rows.clone().requires_grad_();
    for (size_t pair = 0; pair < 2; ++pair) {
      const auto both = [this, pair](const Tensor& x) {
        return torch::tanh(parts[2 * pair](torch::tanh(parts[2 * pair + 1](x))));
      };
      h = recomputed(both, h);
    }
    return h.sum(1, /*keepdim=*/true);
  }
  std::vector<nn::Linear> parts;
};

TEST(FsdpOfPlainModules, RecomputedActivationsTrainAsPlain) {
  expect_trains_as_plain([] { return prepared<RecomputedNet>(); }, leaves());
  expect_trains_as_plain([] { return prepared<RecomputedNet>(); }, leaves(), Accumulation<false>{});
}

// Layers that are frozen in part or as a whole, at the beginning, between others and at the end.
struct FrozenNet : ResidualNet {
  FrozenNet() {
    for (nn::Module* const frozen :
         {static_cast<nn::Module*>(stem.get()), static_cast<nn::Module*>(second.get())}) {
      for (Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    }
    norm->bias.requires_grad_(false);
  }
};

TEST(FsdpOfPlainModules, FrozenModulesTrainAsPlain) {
  for (const Reshard reshard : {Reshard::kAfterForward, Reshard::kAfterBackward}) {
    expect_trains_as_plain([] { return prepared<FrozenNet>(); }, leaves(reshard));
    expect_trains_as_plain([] { return prepared<FrozenNet>(); }, leaves(reshard),
                           Accumulation<false>{});
  }
}

// A module that is frozen as a whole: a teacher, whose outputs are a target, and a language model
// whose inputs are trained (prompt tuning).
TEST(FsdpOfPlainModules, AModuleMayBeFrozenAsAWhole) {
  const auto frozen = [] {
    const auto net = prepared<EncoderNet>();
    for (Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
    return net;
  };
  const auto gradient_of = [](auto& model, const Tensor& rows) {
    const Tensor prompt = rows.clone().requires_grad_();
    model.forward(prompt).pow(2).sum().backward();
    return prompt.grad().clone();
  };
  const auto plain = frozen();
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    FullyShardedDataParallel model{frozen(), group, layers()};
    for (int step = 0; step < 3; ++step) {
      const Tensor rows = rows_of(group, step);
      EXPECT_TRUE(torch::allclose(model(rows), plain->forward(rows), 1e-12, 1e-12));
      EXPECT_TRUE(
          torch::allclose(gradient_of(model, rows), gradient_of(*plain, rows), 1e-12, 1e-12))
          << step;
    }
    EXPECT_EQ(model.full_bytes(), 0);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Units in units: a container of libtorch whose layers are units, too, and a parameter of the outer
// module that is used before and after them.
struct NestedImpl : nn::Module {
  NestedImpl() {
    inner = register_module("inner", nn::Linear(kWidth, kWidth));
    scale = register_parameter("scale", torch::ones({kWidth}));
  }
  Tensor forward(const Tensor& x) { return torch::tanh(inner(x * scale)) + scale; }
  nn::Linear inner{nullptr};
  Tensor scale;
};
TORCH_MODULE(Nested);

struct NestedNet : nn::Module {
  NestedNet() {
    layers = register_module("layers", nn::Sequential(Nested(), Nested(), nn::Linear(kWidth, 1)));
  }
  Tensor forward(const Tensor& rows) { return layers->forward(rows); }
  nn::Sequential layers{nullptr};
};

TEST(FsdpOfPlainModules, UnitsInUnitsTrainAsPlain) {
  for (const Reshard reshard :
       {Reshard::kAfterForward, Reshard::kAfterBackward, Reshard::kAfterReduction}) {
    expect_trains_as_plain([] { return prepared<NestedNet>(); }, leaves(reshard));
  }
}

// A unit around another one stays full while that one is used.
TEST(FsdpOfPlainModules, UnitsInUnitsAreGatheredOnceInEachPass) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel model{prepared<NestedNet>(), group, leaves()};
    const auto num_gathers = [&] {
      size_t count = 0;
      for (const FlightEntry& entry : group.communicator().flight_record().entries) {
        if (OpDescriptor::from_fingerprint(entry.fingerprint).kind == OpKind::kAllGather) ++count;
      }
      return count;
    };
    size_t before = 0;
    for (int step = 0; step < 4; ++step) {
      before = num_gathers();
      model(rows_of(group, step)).pow(2).mean().backward();
    }
    // The backward does not need the scale that the first module multiplies its input by.
    EXPECT_EQ(num_gathers() - before, 5 + 4) << "forward and backward";
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Operations that are given parameters of several units need all of them at the same time.
struct JointSteps {
  template <typename Model>
  void operator()(Model& model, const Tensor& rows) const {
    NestedNet& net = module_of(model);
    const auto weight_of = [&](size_t i) {
      return net.layers[i]->template as<Nested>()->inner->weight;
    };
    const Tensor both = torch::stack({weight_of(0), weight_of(1)}).sum();
    const Tensor product = torch::mm(weight_of(0), weight_of(1)).mean();
    (model.forward(rows).pow(2).mean() + both / 10 + product).backward();
  }
};

TEST(FsdpOfPlainModules, OperationsOnSeveralUnitsTrainAsPlain) {
  expect_trains_as_plain([] { return prepared<NestedNet>(); }, leaves(), JointSteps{});
}

// A forward that fails in the middle on all ranks, and a loss that autograd differentiates twice.
struct FailingSteps {
  template <typename Model>
  void operator()(Model& model, const Tensor& rows) const {
    EXPECT_THAT(failure_of([&] { model.forward(rows.narrow(1, 0, kWidth - 1)); }),
                HasSubstr("must match the size of tensor b"));
    model.forward(rows).pow(2).mean().backward();
  }
};

struct TwiceDifferentiatedSteps {
  template <typename Model>
  void operator()(Model& model, const Tensor& rows) const {
    const Tensor x = rows.clone().requires_grad_();
    const Tensor loss = model.forward(x).pow(2).mean();
    const Tensor slope = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
    (loss + slope.pow(2).sum()).backward();
  }
};

TEST(FsdpOfPlainModules, FailedForwardsAndSecondDerivativesTrainAsPlain) {
  expect_trains_as_plain([] { return prepared<NestedNet>(); }, leaves(), FailingSteps{});
  expect_trains_as_plain([] { return prepared<NestedNet>(); }, leaves(), TwiceDifferentiatedSteps{},
                         {1});
}

TEST(FsdpOfPlainModules, OtherFormsOfShardsTrainAsPlain) {
  FullyShardedDataParallelOptions mapped = layers();
  mapped.form = ShardForm::kMapped;
  const Snapshot expected = train_plain(prepared<EncoderNet>(), PlainSteps{});
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    FullyShardedDataParallel model{prepared<EncoderNet>(), group, mapped};
    ShardedOptimizer<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
    for (int i = 0; i < kTowerSteps; ++i) {
      optimizer.zero_grad();
      model(rows_of(group, i)).pow(2).mean().backward();
      optimizer.step();
    }
    expect_equal(assembled_parameters(model, group), expected);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The memory that an earlier read has gathered is old after an update by any optimizer: an
// operation gathers again, and an access without an operation throws.
TEST(FsdpOfPlainModules, AnUpdateMakesGatheredParametersOld) {
  for (const auto dtype : {torch::kDouble, torch::kBFloat16}) {
    const auto result = run_groups(3, [&](const ProcessGroup& group) {
      const auto net = std::make_shared<nn::LinearImpl>(9, 10);
      net->to(dtype);
      set_values(*net);
      FullyShardedDataParallel model{net, group};
      AdamW fused(model.parameters(), torch::optim::AdamWOptions(0.1));
      torch::optim::SGD plain(model.parameters(), 0.1);
      for (torch::optim::Optimizer* const optimizer :
           std::initializer_list<torch::optim::Optimizer*>{&fused, &plain}) {
        model(torch::ones({2, 9}, dtype)).pow(2).mean().backward();
        const Tensor before = net->weight.clone();
        optimizer->step();
        EXPECT_THAT(failure_of([&] { net->weight.const_data_ptr(); }),
                    HasSubstr("have changed on the ranks that own them"));
        EXPECT_FALSE(torch::equal(net->weight.clone(), before));
        EXPECT_TRUE(torch::equal(net->weight.clone(), assembled_parameters(model, group)[0]));
      }
      // One operation that reads parameters and writes to shards.
      const torch::NoGradGuard no_grad;
      for (const ParameterShard& shard : model.parameter_shards()) {
        const Tensor whole = shard.parameter.view(-1);
        shard.values.add_(whole.narrow(0, shard.range.begin, shard.range.size()));
        const Tensor gathered = shard.parameter.clone();
        EXPECT_TRUE(torch::equal(gathered, assembled(shard, shard.values, group)));
      }
    });
    EXPECT_TRUE(result.ok()) << result.failures();
  }
}

// A penalty uses all units first in backward; they are freed and gathered again.
TEST(FsdpOfPlainModules, APenaltyHoldsNoMoreUnits) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = prepared<EncoderNet>();
    FullyShardedDataParallel model{net, group, layers()};
    int64_t peak = 0;
    int64_t layer_bytes = 0;
    std::vector<Tensor> weights;
    for (size_t i = 0; i < 3; ++i) {
      const auto* const layer = net->encoder->layers[i]->as<nn::TransformerEncoderLayer>();
      weights.push_back(layer->linear1->weight);
      weights.back().register_hook(
          [&](const Tensor&) { peak = std::max(peak, model.full_bytes()); });
      layer_bytes = 0;
      for (const Tensor& parameter : layer->parameters()) {
        layer_bytes += static_cast<int64_t>(parameter.numel() * sizeof(double));
      }
    }
    for (int step = 0; step < 3; ++step) {
      peak = 0;
      Tensor loss = model(rows_of(group, step)).pow(2).mean();
      for (const Tensor& weight : weights) loss = loss + weight.pow(2).sum();
      loss.backward();
    }
    EXPECT_GT(peak, layer_bytes);
    EXPECT_LT(peak, 3 * layer_bytes);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Grad mode is on in a recomputation, also in a backward without create_graph.
TEST(FsdpOfPlainModules, ARecomputationAtTheStartOfABackwardFreesTheUnits) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = prepared<RecomputedNet>();
    for (Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
    FullyShardedDataParallel model{net, group, leaves()};
    for (int step = 0; step < 3; ++step) {
      net->forward(rows_of(group, step).requires_grad_()).sum().backward();
      const torch::NoGradGuard no_grad;
      model(rows_of(group, step));
      EXPECT_EQ(model.full_bytes(), 0) << step;
    }
    net->parts[0]->weight.requires_grad_(true);
    EXPECT_THAT(failure_of([&] { net->forward(rows_of(group, 0)); }),
                HasSubstr("\"part0.weight\" was frozen when the module was wrapped"));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Ranks that use the units in different orders must not mix up parameters of equal sizes.
TEST(FsdpOfPlainModules, RanksThatUseOtherUnitsFail) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = prepared<RecomputedNet>();
    FullyShardedDataParallel model{net, group, leaves()};
    const std::string failure = failure_of([&] {
      const torch::NoGradGuard no_grad;
      net->parts[static_cast<size_t>(group.rank())]->weight.sum();
    });
    EXPECT_THAT(failure, HasSubstr("the ranks use different units: rank 0 uses \"part0\" in an "
                                   "operation outside of forward() and backward(), rank 1 uses "
                                   "\"part1\""));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A loss that reads weights outside of forward(): a penalty on the weights of one unit, and a
// product with a weight of the root.
struct PenaltySteps {
  template <typename Model>
  void operator()(Model& model, const Tensor& rows) const {
    EncoderNet& net = module_of(model);
    const Tensor output = model.forward(rows);
    const auto& layer = net.encoder->layers[1]->as<nn::TransformerEncoderLayer>()->linear1;
    const Tensor penalty = layer->weight.pow(2).sum() + net.outputs->weight.abs().sum();
    (output.pow(2).mean() + 0.1 * penalty).backward();
  }
};

TEST(FsdpOfPlainModules, WeightsAreReadOutsideOfForward) {
  expect_trains_as_plain([] { return prepared<EncoderNet>(); }, layers(), PenaltySteps{});
  expect_trains_as_plain([] { return prepared<EncoderNet>(); }, leaves(), PenaltySteps{});
}

// The values of a direct call are right, but no forward of the wrapper belongs to its backward.
TEST(FsdpOfPlainModules, ABackwardWithoutAForwardOfTheWrapperFails) {
  const auto plain = prepared<EncoderNet>();
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = prepared<EncoderNet>();
    FullyShardedDataParallel model{net, group, layers()};
    const Tensor output = net->forward(rows_of(group, 0));
    EXPECT_TRUE(torch::allclose(output, plain->forward(rows_of(group, 0)), 1e-12, 1e-12));
    EXPECT_THAT(failure_of([&] { output.sum().backward(); }),
                HasSubstr("came without a forward through the wrapper"));
    EXPECT_THAT(failure_of([&] { net->outputs->weight.pow(2).sum().backward(); }),
                HasSubstr("came without a forward through the wrapper"));
    model(rows_of(group, 0)).pow(2).mean().backward();
    EXPECT_EQ(model.full_bytes(), 0);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// Another method than forward(), called on the module: it must see the parameters of the last
// update.
TEST(FsdpOfPlainModules, OtherMethodsReadTheCurrentParameters) {
  const auto outputs_of = [](EncoderNet& net, const Tensor& rows) {
    const torch::NoGradGuard no_grad;
    return net.outputs(net.encoder(net.inputs(sequences(rows)).transpose(0, 1))).clone();
  };
  const auto plain = prepared<EncoderNet>();
  torch::optim::SGD sgd(plain->parameters(), 0.1);
  std::vector<Tensor> expected = {outputs_of(*plain, data_of(0))};
  for (int step = 0; step < 3; ++step) {
    sgd.zero_grad();
    plain->forward(data_of(step)).pow(2).mean().backward();
    expected.push_back(outputs_of(*plain, data_of(0)));
    sgd.step();
    expected.push_back(outputs_of(*plain, data_of(0)));
  }
  const auto result = run_groups(3, [&](const ProcessGroup& group) {
    const auto net = prepared<EncoderNet>();
    FullyShardedDataParallel model{net, group, layers()};
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    size_t next = 0;
    const auto compare = [&] {
      const Tensor found = outputs_of(*net, data_of(0));
      EXPECT_TRUE(torch::allclose(found, expected[next], 1e-12, 1e-12)) << next;
      ++next;
    };
    compare();
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model(rows_of(group, step)).pow(2).mean().backward();
      compare();
      optimizer.step();
      compare();
    }
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpOfPlainModules, HoldsOneUnitAndThePrefetchedOne) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = prepared<EncoderNet>();
    FullyShardedDataParallelOptions options = layers();
    FullyShardedDataParallel model{net, group, options};
    EXPECT_EQ(model.full_bytes(), 0);
    for (int step = 0; step < 2; ++step) {
      net->encoder->layers[2]->as<nn::TransformerEncoderLayer>()->linear1->weight.sum();
      model(rows_of(group, step)).pow(2).mean().backward();
      EXPECT_EQ(model.full_bytes(), 0);
    }
    int64_t layer_bytes = 0;
    for (const Tensor& parameter : net->encoder->layers[0]->parameters()) {
      layer_bytes += static_cast<int64_t>(parameter.numel() * sizeof(double));
    }
    EXPECT_LT(model.peak_full_bytes(), 3 * layer_bytes);
    EXPECT_GE(model.peak_full_bytes(), 2 * layer_bytes);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// A parameter with other memory would be used with the values of this rank alone.
TEST(FsdpOfPlainModules, RefusesParametersWithOtherMemory) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = prepared<EncoderNet>();
    FullyShardedDataParallel model{net, group, layers()};
    const Tensor weight =
        net->encoder->layers[1]->as<nn::TransformerEncoderLayer>()->linear1->weight;
    weight.set_data(torch::zeros_like(weight));
    const auto sentence = HasSubstr(
        "\"encoder.layers.1.linear1.weight\" has been given other memory since it was sharded");
    EXPECT_THAT(failure_of([&] { net->outputs->weight.sum(); }), sentence);
    EXPECT_THAT(failure_of([&] { model(rows_of(group, 0)); }), sentence);
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(FsdpOfPlainModules, RefusesModulesThatWereMovedAfterwards) {
  const auto result = run_groups(2, [&](const ProcessGroup& group) {
    const auto net = prepared<EncoderNet>();
    FullyShardedDataParallel model{net, group, layers()};
    net->encoder->layers[1]->as<nn::TransformerEncoderLayer>()->linear1->to(torch::kFloat);
    EXPECT_THAT(failure_of([&] { model(rows_of(group, 0)); }),
                HasSubstr("\"encoder.layers.1.linear1.weight\""));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

}  // namespace
}  // namespace cadre
