#include "cadre/train/training/training_options.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"

namespace cadre {
namespace {

constexpr const char* kCall = "cadre::Training";

[[noreturn]] void refuse_options(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", kCall, what));
}

DataStrategy chosen_strategy(const TrainingOptions& options) {
  if (options.strategy) return *options.strategy;
  const char* const text = std::getenv(kStrategyVariable);
  if (text == nullptr || *text == '\0') return DataStrategy::kDdp;
  if (const auto named = parse_data_strategy(text)) return *named;
  std::string names;
  for (const DataStrategy strategy : kDataStrategies) {
    names += format("{}{}", names.empty() ? "" : ", ", to_string(strategy));
  }
  refuse_options(
      format("{} is \"{}\"; it names one of the strategies {}", kStrategyVariable, text, names));
}

void check_training_options(const TrainingOptions& options, DataStrategy strategy,
                            const Ranks& ranks) {
  if (strategy == DataStrategy::kSingle && ranks.size() > 1) {
    refuse_options(
        format("the strategy is single, and there are {} ranks, each of which would train by "
               "itself: start one process, or choose ddp, zero1, zero2, fsdp or hsdp",
               ranks.size()));
  }
  if (options.num_parts < 1) {
    refuse_options(format("options.num_parts is {}; choose 1 or more", options.num_parts));
  }
  if (options.max_norm && !(*options.max_norm > 0)) {
    refuse_options(format("options.max_norm is {}; choose a number above 0, or leave it out",
                          *options.max_norm));
  }
  if (!options.fsdp.ignored.empty()) {
    refuse_options(
        "options.fsdp.ignored names parameters that no optimizer of a Training would update: make "
        "a FullyShardedDataParallel yourself, and an optimizer with a group for them");
  }
  if (options.ddp.comm_hook && has_units(strategy)) {
    refuse_options(
        format("options.ddp.comm_hook is set, and {} reduces gradients without hooks: leave it "
               "out, or choose ddp or zero1",
               to_string(strategy)));
  }
  if (options.autocast && *options.autocast != at::kBFloat16 && *options.autocast != at::kHalf) {
    refuse_options(format("options.autocast is {}; choose BFloat16 or Half, or leave it out",
                          c10::toString(*options.autocast)));
  }
}

// Returns the number of groups of hsdp that each have the whole model.
int replicas_of(const TrainingOptions& options, const ProcessGroup& world) {
  int num_replicas = options.num_replicas;
  if (num_replicas == 0) {
    const std::vector<int> hosts = world.communicator().hosts();
    num_replicas = std::max(2, *std::ranges::max_element(hosts) + 1);
  }
  if (num_replicas >= 1 && world.world_size() % num_replicas == 0) return num_replicas;
  refuse_options(
      format("hsdp divides {} ranks into {} groups that each have the whole model, which is not "
             "possible; set options.num_replicas to a number that divides the ranks, or pass a "
             "mesh of two axes (replicate, then shard)",
             world.world_size(), num_replicas));
}

// Agrees with the other ranks on the options, which it checks, and returns the strategy.
DataStrategy agreed_strategy(const TrainingOptions& options, const Ranks& ranks) {
  DataStrategy strategy = DataStrategy::kDdp;
  const auto make_fields = [&]() -> std::vector<AgreedField> {
    strategy = chosen_strategy(options);
    check_training_options(options, strategy, ranks);
    return {{"the strategy", std::string(to_string(strategy))},
            {"options.num_replicas", format("{}", options.num_replicas)},
            {"options.num_parts", format("{}", options.num_parts)},
            {"options.weighting", std::string(to_string(options.weighting))},
            {"options.max_norm", options.max_norm ? format("{}", *options.max_norm) : "unset"},
            {"options.autocast", options.autocast ? c10::toString(*options.autocast) : "unset"}};
  };
  check_equal_on_all_ranks(
      ranks.group(), kCall, make_fields,
      "pass the same options on all ranks, and start all hosts with the same CADRE_STRATEGY");
  return strategy;
}

Ranks ranks_of_strategy(const TrainingOptions& options, DataStrategy strategy, const Ranks& ranks) {
  const bool has_two_axes = ranks.mesh() && ranks.mesh()->axes().size() == 2;
  if (strategy == DataStrategy::kHsdp && has_two_axes) return ranks;
  const ProcessGroup& world = ranks.group_of_one_axis(kCall, "dp");
  if (strategy != DataStrategy::kHsdp) return ranks;
  const int num_replicas = replicas_of(options, world);
  return DeviceMesh(world,
                    {{"replicate", num_replicas}, {"shard", world.world_size() / num_replicas}});
}

}  // namespace

TrainingDivision::TrainingDivision(const Ranks& ranks, const TrainingOptions& options)
    : strategy_(agreed_strategy(options, ranks)),
      ranks_(ranks_of_strategy(options, strategy_, ranks)) {}

std::vector<ProcessGroup> TrainingDivision::groups_of_axes() const {
  std::vector<ProcessGroup> groups;
  if (!ranks_.mesh() || ranks_.mesh()->axes().size() < 2) return groups;
  for (const MeshAxis& axis : ranks_.mesh()->axes()) {
    groups.push_back(ranks_.mesh()->group(axis.name));
  }
  return groups;
}

}  // namespace cadre
