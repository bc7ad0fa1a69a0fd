#include "cadre/train/checkpoint/optimizer_state.h"

#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cadre/parallel/shard/division/boxes.h"
#include "cadre/tensor/group/file_memory.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/checkpoint/sharded_load.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;
using torch::optim::Optimizer;
using Make = std::function<std::unique_ptr<Optimizer>(const std::vector<at::Tensor>&)>;

template <typename Made, typename Options>
Make maker(const Options& options) {
  return [options](const std::vector<at::Tensor>& leaves) {
    return std::make_unique<Made>(leaves, options);
  };
}

std::vector<std::pair<std::string, Make>> rules() {
  namespace optim = torch::optim;
  return {
      {"adam", maker<optim::Adam>(optim::AdamOptions(0.1))},
      {"amsgrad", maker<optim::Adam>(optim::AdamOptions(0.1).amsgrad(true))},
      {"adamw", maker<optim::AdamW>(optim::AdamWOptions(0.1))},
      {"sgd", maker<optim::SGD>(optim::SGDOptions(0.1))},
      {"momentum", maker<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9))},
      {"rmsprop", maker<optim::RMSprop>(optim::RMSpropOptions(0.1))},
      {"centered", maker<optim::RMSprop>(optim::RMSpropOptions(0.1).momentum(0.9).centered(true))},
      {"adagrad", maker<optim::Adagrad>(optim::AdagradOptions(0.1).lr_decay(0.1))},
      {"cadre_adagrad", maker<Adagrad>(optim::AdagradOptions(0.1).lr_decay(0.1))},
      {"adadelta", maker<Adadelta>(AdadeltaOptions(0.1))},
  };
}

const std::vector<std::vector<int64_t>> kShapes = {{4, 3}, {5}, {}, {7, 2}};

// The leaves of one rank, which are slices of the flattened parameters. The last parameter never
// gets a gradient.
struct OwnedSlices {
  OwnedSlices(int rank, int size) {
    for (size_t i = 0; i < kShapes.size(); ++i) {
      const int64_t numel = c10::multiply_integers(kShapes[i]);
      const FlatRange range{numel * rank / size, numel * (rank + 1) / size};
      const Box whole{std::vector<int64_t>(kShapes[i].size(), 0), kShapes[i]};
      ranges.push_back(range);
      leaves.push_back(
          torch::arange(range.begin, range.end).to(at::kFloat).div_(10).requires_grad_(true));
      parts.parameters.push_back({"p" + std::to_string(i), kShapes[i],
                                  shard::boxes_of_range(whole, range), leaves.back()});
    }
  }

  void step(Optimizer& optimizer, int number) {
    for (size_t i = 0; i + 1 < leaves.size(); ++i) {
      const at::Tensor index = torch::arange(ranges[i].begin, ranges[i].end).to(at::kFloat);
      // Exact in float: a function such as sin() may round elements of a slice differently.
      const at::Tensor shifted = index * 37 + static_cast<double>(11 * i) + 17.0 * number;
      leaves[i].mutable_grad() = torch::remainder(shifted, 101).sub(50).div(64);
    }
    optimizer.step();
  }

  std::vector<FlatRange> ranges;
  std::vector<at::Tensor> leaves;
  SnapshotParts parts;
};

// Two ranks train three steps and save the optimizer's state. Three ranks load it and train three
// more steps; the parameters must have the same bits as without the save.
TEST(OptimizerState, EveryOptimizerGoesOnOnOtherRanksBitForBit) {
  for (const auto& [name, make] : rules()) {
    const testing::TemporaryFolder run;
    const auto before = testing::run_groups(2, [&, make = make](const ProcessGroup& group) {
      OwnedSlices rank(group.rank(), 2);
      const auto optimizer = make(rank.leaves);
      for (int i = 0; i < 3; ++i) rank.step(*optimizer, i);
      rank.parts.optimizer = state_dict(*optimizer, rank.parts.parameters);
      SnapshotFolder folder(run.path());
      save_sharded(folder, 3, rank.parts, group);
    });
    ASSERT_TRUE(before.ok()) << name << before.failures();
    const auto after = testing::run_groups(3, [&, make = make](const ProcessGroup& group) {
      OwnedSlices rank(group.rank(), 3);
      const auto optimizer = make(rank.leaves);
      const LoadedSnapshot loaded =
          load_sharded(*SnapshotFolder(run.path()).latest(), rank.parts, group);
      load_state_dict(*optimizer, rank.parts.parameters, loaded.optimizer);
      for (int i = 3; i < 6; ++i) rank.step(*optimizer, i);

      OwnedSlices whole(0, 1);
      const auto uninterrupted = make(whole.leaves);
      for (int i = 0; i < 6; ++i) whole.step(*uninterrupted, i);
      for (size_t i = 0; i < kShapes.size(); ++i) {
        const auto [begin, end] = rank.ranges[i];
        if (!whole.leaves[i].slice(0, begin, end).allclose(rank.leaves[i], 1e-6, 1e-7)) {
          throw std::runtime_error(rank.parts.parameters[i].name);
        }
      }
    });
    EXPECT_TRUE(after.ok()) << name << after.failures();
  }
}

// The test keeps the result of state_dict() while training continues, and later loads it into two
// optimizers. Neither may change it.
TEST(OptimizerState, AStateIsCopiedOnTheWayOutAndOnTheWayIn) {
  for (const auto& [name, make] : rules()) {
    OwnedSlices rank(0, 1);
    const auto optimizer = make(rank.leaves);
    for (int i = 0; i < 2; ++i) rank.step(*optimizer, i);
    const std::vector<ParameterState> kept = state_dict(*optimizer, rank.parts.parameters);
    OwnedSlices twin(0, 1);
    const auto of_twin = make(twin.leaves);
    for (int i = 0; i < 2; ++i) twin.step(*of_twin, i);
    twin.step(*of_twin, 7);
    const auto go_back_and_step = [&](OwnedSlices& other, Optimizer& its_optimizer) {
      OwnedSlices start(0, 1);
      const auto first = make(start.leaves);
      for (int i = 0; i < 2; ++i) start.step(*first, i);
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < start.leaves.size(); ++i) other.leaves[i].copy_(start.leaves[i]);
      load_state_dict(its_optimizer, other.parts.parameters, kept);
      other.step(its_optimizer, 7);
      for (size_t i = 0; i < start.leaves.size(); ++i) {
        EXPECT_TRUE(other.leaves[i].equal(twin.leaves[i])) << name << " " << i;
      }
    };
    for (int i = 2; i < 5; ++i) rank.step(*optimizer, i);
    go_back_and_step(rank, *optimizer);
    go_back_and_step(rank, *optimizer);
    OwnedSlices other(0, 1);
    const auto of_other = make(other.leaves);
    go_back_and_step(other, *of_other);
  }
}

// Resumes as docs/guide/training/snapshots.md describes: a learning rate schedule has no state
// except its number of steps, so the resumed program steps it that often.
TEST(OptimizerState, AScheduleThatIsSteppedAsOftenGoesOn) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  const auto train = [&](int first, int last, OwnedSlices& rank, Optimizer& optimizer) {
    torch::optim::StepLR schedule(optimizer, /*step_size=*/2, /*gamma=*/0.5);
    for (int i = 0; i < first; ++i) schedule.step();
    for (int i = first; i < last; ++i) {
      rank.step(optimizer, i);
      schedule.step();
    }
  };
  OwnedSlices whole(0, 1);
  torch::optim::AdamW uninterrupted(whole.leaves, torch::optim::AdamWOptions(0.1));
  train(0, 7, whole, uninterrupted);
  OwnedSlices before(0, 1);
  torch::optim::AdamW optimizer(before.leaves, torch::optim::AdamWOptions(0.1));
  train(0, 3, before, optimizer);
  before.parts.optimizer = state_dict(optimizer, before.parts.parameters, {.is_shared = true});
  save_sharded(folder, 3, before.parts);
  OwnedSlices after(0, 1);
  torch::optim::AdamW resumed(after.leaves, torch::optim::AdamWOptions(0.1));
  const LoadedSnapshot loaded = load_sharded(folder.path_of(3), after.parts);
  load_state_dict(resumed, after.parts.parameters, loaded.optimizer);
  train(static_cast<int>(loaded.step), 7, after, resumed);
  for (size_t i = 0; i < whole.leaves.size(); ++i) {
    EXPECT_TRUE(after.leaves[i].equal(whole.leaves[i])) << i;
  }
}

TEST(OptimizerState, TheSharedFormHasTheTensorsOfTheOptimizer) {
  OwnedSlices rank(0, 1);
  torch::optim::AdamW optimizer(rank.leaves, torch::optim::AdamWOptions(0.1));
  rank.step(optimizer, 0);
  const auto shared = state_dict(optimizer, rank.parts.parameters, {.is_shared = true});
  const auto again = state_dict(optimizer, rank.parts.parameters, {.is_shared = true});
  const auto copied = state_dict(optimizer, rank.parts.parameters);
  ASSERT_EQ(shared.size(), copied.size());
  for (size_t i = 0; i < shared.size(); ++i) {
    EXPECT_TRUE(shared[i].tensors[0].tensor.is_same(again[i].tensors[0].tensor));
    EXPECT_FALSE(shared[i].tensors[0].tensor.is_alias_of(copied[i].tensors[0].tensor));
    EXPECT_TRUE(shared[i].tensors[0].tensor.equal(copied[i].tensors[0].tensor));
  }
}

// If the memory of a parameter is a mapped file, its loaded state is copied into that file, even if
// the given tensors already lie in another file.
TEST(OptimizerState, TheStateOfAParameterInAFileIsCopiedIntoTheFile) {
  const testing::TemporaryFolder folder;
  const auto file = FileMemory::open(folder.path());
  file->reserve(1 << 20);
  const at::Tensor leaf = file->zeros(12, at::kFloat).requires_grad_();
  torch::optim::AdamW optimizer({leaf}, torch::optim::AdamWOptions(0.1));
  SnapshotParts parts;
  parts.parameters = {whole_tensor("w", leaf)};
  const at::Tensor in_file = file->zeros(12, at::kFloat);
  ParameterState state{.parameter = "w",
                       .tensors = {{"exp_avg", in_file}, {"exp_avg_sq", torch::ones({12})}},
                       .scalars = {{"step", torch::tensor(int64_t{3})}}};
  load_state_dict(optimizer, parts.parameters, std::vector{state});
  const auto shared = state_dict(optimizer, parts.parameters, {.is_shared = true});
  for (const auto& [name, tensor] : shared.at(0).tensors) {
    EXPECT_EQ(FileMemory::of(tensor), file) << name;
    EXPECT_FALSE(tensor.is_alias_of(in_file)) << name;
  }
  EXPECT_TRUE(shared[0].tensors[1].tensor.equal(torch::ones({12})));
  const auto copied = state_dict(optimizer, parts.parameters);
  EXPECT_EQ(FileMemory::of(copied.at(0).tensors.at(0).tensor), nullptr);
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  }
  return "";
}

TEST(OptimizerState, AStateThatDoesNotFitIsRefusedAndNothingIsChanged) {
  OwnedSlices rank(0, 1);
  torch::optim::AdamW optimizer(rank.leaves, torch::optim::AdamWOptions(0.1));
  rank.step(optimizer, 0);
  const auto& parameters = rank.parts.parameters;
  const auto states = state_dict(optimizer, parameters);
  ASSERT_EQ(states.size(), kShapes.size() - 1);
  const auto refusal = [&](const std::function<void(std::vector<ParameterState>&)>& change) {
    auto changed = states;
    change(changed);
    const std::string message =
        message_of([&] { load_state_dict(optimizer, parameters, changed); });
    EXPECT_EQ(optimizer.state().size(), states.size());
    return message;
  };
  EXPECT_EQ(refusal([](auto& all) { all[0].parameter = "q"; }),
            "state of 'q' for AdamW: the optimizer has no such parameter");
  const std::string other_kind =
      ", so another kind of optimizer has saved it, or one with other options. Load it into that "
      "optimizer, with the same options; or leave out load_state_dict(), and the optimizer begins "
      "anew";
  EXPECT_EQ(refusal([](auto& all) { all[1].tensors.pop_back(); }),
            "state of 'p1' for AdamW: 'exp_avg_sq' is missing; the state has 'exp_avg', 'step'" +
                other_kind);
  EXPECT_EQ(refusal([](auto& all) { all[1].scalars.clear(); }),
            "state of 'p1' for AdamW: 'step' is missing; the state has 'exp_avg', 'exp_avg_sq'" +
                other_kind);
  EXPECT_EQ(refusal([](auto& all) { all[0].tensors[0].tensor = torch::zeros({3}); }),
            "state of 'p0' for AdamW: 'exp_avg' has 3 elements; expected 12");
  EXPECT_EQ(refusal([](auto& all) { all[0].tensors.emplace_back("sum", torch::zeros({12})); }),
            "state of 'p0' for AdamW: the optimizer has no state 'sum' with these options; use the "
            "kind of optimizer that was saved");
  EXPECT_EQ(refusal([](auto& all) { all[0].scalars.emplace_back("lr", torch::zeros({})); }),
            "state of 'p0' for AdamW: it has 2 scalars; expected 1");
  EXPECT_EQ(refusal([](auto& all) { all[0].tensors[0].tensor = torch::zeros({12}, at::kDouble); }),
            "state of 'p0' for AdamW: 'exp_avg' has dtype Double; expected Float, the dtype of the "
            "parameter");
  EXPECT_EQ(refusal([](auto& all) { all[0].tensors[1].tensor = at::Tensor(); }),
            "state of 'p0' for AdamW: 'exp_avg_sq' is missing; the state has 'exp_avg', 'step'" +
                other_kind);
  EXPECT_EQ(refusal([](auto& all) { all[0].tensors.push_back(all[0].tensors[0]); }),
            "state of 'p0' for AdamW: it has 3 tensors; expected 2, each once");
  EXPECT_EQ(refusal([](auto& all) { all.push_back(all[0]); }),
            "state of 'p0' for AdamW: the state is given twice");
  EXPECT_EQ(refusal([](auto& all) { all[0].scalars[0].tensor = torch::tensor(-1); }),
            "state of 'p0' for AdamW: 'step' is -1; expected 0 or more");
}

TEST(OptimizerState, TheStateOfAnotherKindOfOptimizerIsRefusedAsSuch) {
  OwnedSlices rank(0, 1);
  torch::optim::SGD sgd(rank.leaves, torch::optim::SGDOptions(0.1).momentum(0.9));
  rank.step(sgd, 0);
  const auto states = state_dict(sgd, rank.parts.parameters);
  torch::optim::AdamW optimizer(rank.leaves, torch::optim::AdamWOptions(0.1));
  EXPECT_THAT(
      message_of([&] { load_state_dict(optimizer, rank.parts.parameters, states); }),
      ::testing::HasSubstr("'exp_avg' is missing; the state has 'momentum_buffer', so another kind "
                           "of optimizer has saved it"));
}

// The snapshot was saved without the optimizer. If that were accepted, the moments would restart at
// zero without any message.
TEST(OptimizerState, ASnapshotWithoutStatesIsRefusedUnlessTheOptimizerNeedsNone) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  OwnedSlices rank(0, 1);
  const auto& parameters = rank.parts.parameters;
  torch::optim::AdamW optimizer(rank.leaves, torch::optim::AdamWOptions(0.1));
  rank.step(optimizer, 0);
  const size_t num_states = optimizer.state().size();
  ASSERT_GT(num_states, 0);
  save_sharded(folder, 1, rank.parts);
  const LoadedSnapshot loaded = load_sharded(folder.path_of(1), rank.parts);
  EXPECT_THAT(
      message_of([&] { load_state_dict(optimizer, parameters, loaded.optimizer); }),
      ::testing::HasSubstr("load_state_dict() for AdamW: there is no state of any parameter"));
  EXPECT_EQ(optimizer.state().size(), num_states);
  load_state_dict(optimizer, parameters, loaded.optimizer, {.allow_none = true});
  EXPECT_EQ(optimizer.state().size(), 0);

  torch::optim::SGD sgd(rank.leaves, torch::optim::SGDOptions(0.1));
  load_state_dict(sgd, parameters, loaded.optimizer);
  torch::optim::SGD with_momentum(rank.leaves, torch::optim::SGDOptions(0.1).momentum(0.9));
  EXPECT_NE(message_of([&] { load_state_dict(with_momentum, parameters, loaded.optimizer); }), "");
  for (at::Tensor& leaf : rank.leaves) leaf.set_requires_grad(false);
  load_state_dict(optimizer, parameters, loaded.optimizer);  // frozen parameters need no state
}

// A state that was loaded in inference mode must be usable by optimizer steps outside of that mode.
TEST(OptimizerState, AStateThatIsLoadedInInferenceModeGoesOn) {
  const testing::TemporaryFolder run;
  SnapshotFolder folder(run.path());
  OwnedSlices rank(0, 1);
  torch::optim::AdamW optimizer(rank.leaves, torch::optim::AdamWOptions(0.1));
  rank.step(optimizer, 0);
  rank.parts.optimizer = state_dict(optimizer, rank.parts.parameters);
  save_sharded(folder, 1, rank.parts);
  {
    const c10::InferenceMode mode;
    const LoadedSnapshot loaded = load_sharded(folder.path_of(1), rank.parts);
    load_state_dict(optimizer, rank.parts.parameters, loaded.optimizer);
  }
  OwnedSlices twin(0, 1);
  torch::optim::AdamW of_twin(twin.leaves, torch::optim::AdamWOptions(0.1));
  for (int i = 0; i < 2; ++i) twin.step(of_twin, i);
  rank.step(optimizer, 1);
  for (size_t i = 0; i < rank.leaves.size(); ++i) {
    EXPECT_TRUE(rank.leaves[i].equal(twin.leaves[i])) << i;
  }
}

TEST(OptimizerState, AnOptimizerOfOtherLeavesOrOfNoKnownKindIsRefused) {
  OwnedSlices rank(0, 1);
  OwnedSlices other(0, 1);
  torch::optim::SGD optimizer(other.leaves, torch::optim::SGDOptions(0.1));
  EXPECT_THAT(
      message_of([&] { state_dict(optimizer, rank.parts.parameters); }),
      HasSubstr("parameter 0 of the optimizer, with sizes (12), is none of the 4 parameters"));
  torch::optim::LBFGS lbfgs(rank.leaves, torch::optim::LBFGSOptions(0.1));
  EXPECT_THAT(message_of([&] { state_dict(lbfgs, rank.parts.parameters); }),
              HasSubstr("expected Adam, AdamW, SGD, RMSprop, Adagrad or Adadelta"));
}

}  // namespace
}  // namespace cadre
