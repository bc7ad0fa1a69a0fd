#include "cadre/train/verify/strategy_case.h"

#include <algorithm>
#include <array>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr std::array kReshards{Reshard::kAfterForward, Reshard::kAfterBackward,
                               Reshard::kAfterReduction};

bool selects(std::string_view word, std::string_view name) {
  if (!name.starts_with(word)) return false;
  return name.size() == word.size() || name[word.size()] == '/' || name[word.size()] == '-';
}

// Returns the smallest size above 1 of equal groups into which the ranks can be divided, other than
// one group of all; 0 if there is none.
int group_size_of(int num_shards) {
  for (int size = 2; size < num_shards; ++size) {
    if (num_shards % size == 0) return size;
  }
  return 0;
}

void append_sharded(const StrategyCase& sharded, const StrategySpace& space,
                    std::vector<StrategyCase>& cases) {
  for (const Reshard reshard : kReshards) {
    cases.push_back(sharded);
    cases.back().reshard = reshard;
  }
  const int group_size = group_size_of(space.world_size / sharded.num_replicas);
  if (space.has_group_reshard && group_size > 0) {
    cases.push_back(sharded);
    cases.back().reshard = Reshard::kOntoGroup;
    cases.back().reshard_group_size = group_size;
  }
  cases.push_back(sharded);
  cases.back().form = ShardForm::kMapped;
}

}  // namespace

std::string name_of(const StrategyCase& strategy, int world_size) {
  std::string name(to_string(strategy.strategy));
  if (strategy.strategy == DataStrategy::kHsdp) {
    const int num_ranks =
        world_size / (strategy.pipeline * strategy.expert * strategy.context * strategy.tensor);
    name += format("-{}x{}", strategy.num_replicas, std::max(1, num_ranks / strategy.num_replicas));
  }
  // The name has no mode of resharding in a pipeline, because fsdp does not reshard by units there.
  if (has_units(strategy.strategy) && strategy.pipeline == 1)
    name += format("/{}", to_string(strategy.reshard));
  if (strategy.form == ShardForm::kMapped) name += "/mapped";
  if (strategy.num_parts > 1) name += "/accumulate";
  if (strategy.pipeline > 1) name += format("/pp-{}", strategy.pipeline);
  if (strategy.expert > 1) name += format("/ep-{}", strategy.expert);
  if (strategy.context > 1) name += format("/cp-{}", strategy.context);
  if (strategy.tensor > 1) name += format("/tp-{}", strategy.tensor);
  if (strategy.is_sequence_parallel) name += "-sequence";
  return name;
}

std::vector<StrategyCase> all_strategy_cases(const StrategySpace& space) {
  std::vector<StrategyCase> whole;
  for (const auto strategy : {DataStrategy::kDdp, DataStrategy::kZero1, DataStrategy::kZero2}) {
    whole.push_back({.strategy = strategy});
  }
  append_sharded({.strategy = DataStrategy::kFsdp}, space, whole);
  for (int replicas = 2; replicas < space.world_size; ++replicas) {
    if (space.world_size % replicas != 0) continue;
    append_sharded({.strategy = DataStrategy::kHsdp, .num_replicas = replicas}, space, whole);
  }
  std::vector<StrategyCase> cases;
  for (const StrategyCase& strategy : whole) {
    cases.push_back(strategy);
    if (space.num_parts == 1) continue;
    cases.push_back(strategy);
    cases.back().num_parts = space.num_parts;
  }
  return cases;
}

std::vector<StrategyCase> select_strategy_cases(std::span<const StrategyCase> cases,
                                                std::span<const std::string> words,
                                                int world_size) {
  if (words.empty()) return {cases.begin(), cases.end()};
  std::vector<bool> is_selected(cases.size());
  for (const std::string& word : words) {
    bool selects_any = false;
    for (size_t i = 0; i < cases.size(); ++i) {
      if (!selects(word, name_of(cases[i], world_size))) continue;
      is_selected[i] = selects_any = true;
    }
    if (selects_any) continue;
    std::string names;
    for (const StrategyCase& strategy : cases) {
      names += (names.empty() ? "" : ", ") + name_of(strategy, world_size);
    }
    throw Error(ErrorCode::kInvalidArgument,
                format("no strategy \"{}\" for {} {}; there are: {}", word, world_size,
                       world_size == 1 ? "process" : "processes", names));
  }
  std::vector<StrategyCase> selected;
  for (size_t i = 0; i < cases.size(); ++i) {
    if (is_selected[i]) selected.push_back(cases[i]);
  }
  return selected;
}

}  // namespace cadre
