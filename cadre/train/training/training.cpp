#include "cadre/train/training/training.h"

#include <torch/nn/module.h>

#include <bit>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/fsdp/wrap_policy.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/autograd_hooks.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/train/checkpoint/optimizer_state.h"
#include "cadre/train/checkpoint/sharded_save.h"

namespace cadre::training_parts {

GroupOfParameter group_of_parameters(
    const torch::nn::Module& module,
    std::span<const std::function<bool(const WholeParameter& parameter)>> groups,
    const ProcessGroup& world) {
  GroupOfParameter found;
  check_on_all_ranks(world, kCall, [&] {
    for (const NamedTensor& parameter : distinct_parameters(module)) {
      const WholeParameter whole{.name = parameter.name, .sizes = parameter.tensor.sizes()};
      size_t group = 0;
      while (group < groups.size() && !groups[group](whole)) ++group;
      found.emplace(parameter.name, group);
    }
  });
  return found;
}

void refuse_for_pipelines(std::string_view call) {
  throw Error(
      ErrorCode::kInvalidArgument,
      format("cadre::Training: {} needs the whole model, of which each rank has some layers "
             "(the degree pipeline is above 1); use step(inputs, targets, loss) and "
             "evaluate(inputs, targets, loss)",
             call));
}

double mean_over_rows(const at::Tensor& value, int64_t num_rows, const ProcessGroup& group) {
  if (num_rows < 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "cadre::Training::mean(): there was no step and no evaluation yet, whose rows weight "
        "the value");
  }
  const auto words =
      gather_words(group, "cadre::Training::mean()", 2, [&]() -> std::vector<int64_t> {
        return {std::bit_cast<int64_t>(num_rows == 0 ? 0 : value.item<double>()), num_rows};
      });
  double sum = 0;
  double total = 0;
  for (const std::vector<int64_t>& of_rank : words) {
    const auto rows = static_cast<double>(of_rank[1]);
    sum += std::bit_cast<double>(of_rank[0]) * rows;
    total += rows;
  }
  return sum / total;
}

void run_backward(const at::Tensor& loss) {
  try {
    loss.backward();
  } catch (...) {
    wrap::release_failed_backward();
    throw;
  }
}

std::vector<int64_t> rows_of_parts(const at::Tensor& inputs, const at::Tensor& targets,
                                   int64_t num_parts) {
  if (inputs.dim() == 0 || targets.dim() == 0 || inputs.size(0) != targets.size(0)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        format("cadre::Training::step(): inputs have the sizes {} and targets {}; both need one "
               "row, size(0), for each sample of this rank",
               c10::str(inputs.sizes()), c10::str(targets.sizes())));
  }
  const int64_t num_rows = inputs.size(0);
  std::vector<int64_t> parts;
  for (int64_t part = 0; part < num_parts; ++part) {
    parts.push_back(num_rows * (part + 1) / num_parts - num_rows * part / num_parts);
  }
  return parts;
}

FullyShardedDataParallelOptions with_units(const TrainingOptions& given) {
  FullyShardedDataParallelOptions options = given.fsdp;
  options.weighting = given.weighting;
  if (options.wrap_policy) return options;
  options.wrap_policy = [is_layer = wrap_layers()](const WrapCandidate& candidate) -> WrapChoice {
    return candidate.is_shard_unit ? true : is_layer(candidate);
  };
  return options;
}

void save(SnapshotFolder& folder, int64_t step, SnapshotParts parts,
          const torch::optim::Optimizer& optimizer, const TrainingDivision& division) {
  parts.optimizer = state_dict(optimizer, parts.parameters, {.is_shared = true});
  save_sharded(folder, step, parts, division.world(),
               {.strategy = division.name(), .groups = division.groups_of_axes()});
}

LoadedSnapshot load(const std::string& path, const SnapshotParts& parts,
                    torch::optim::Optimizer& optimizer, const TrainingDivision& division,
                    const LoadOptions& options) {
  LoadedSnapshot loaded = load_sharded(path, parts, division.world(), options);
  if (options.with_optimizer) load_state_dict(optimizer, parts.parameters, loaded.optimizer);
  return loaded;
}

}  // namespace cadre::training_parts
