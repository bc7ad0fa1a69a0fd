#include "cadre/parallel/pp/layered/layered_pipeline.h"

#include <c10/core/UndefinedTensorImpl.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/schedule/generate.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/parallel/pp/pipeline_agreement.h"
#include "cadre/parallel/pp/pipeline_plan.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/operands/memory_extent.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {
namespace {

using parallel::pipeline_refusal;

// One stage: consecutive layers of the model, under their names, and the modules that they share
// with other stages.
class StageOfLayers : public torch::nn::Module {
 public:
  void add(const std::string& name, const torch::nn::AnyModule& layer) {
    layers_.push_back(layer);
    register_module(name, layer.ptr());
  }

  // Registers modules that layers of this stage use but that are layers of other stages, so that
  // their parameters become parameters of this stage, too.
  void add_shared_modules() {
    std::set<const torch::nn::Module*> present;
    for (const auto& module : modules(/*include_self=*/false)) present.insert(module.get());
    for (const auto& layer : named_children()) {
      for (const auto& module : layer.value()->modules()) {
        const auto* const sharing = dynamic_cast<const SharingModule*>(module.get());
        if (sharing == nullptr) continue;
        const auto shared = sharing->shared_module();
        if (shared == nullptr || !present.insert(shared.get()).second) continue;
        register_module(format("{}_shared{}", layer.key(), num_shared_++), shared);
      }
    }
  }

  at::Tensor forward(at::Tensor x) {
    for (torch::nn::AnyModule& layer : layers_) x = layer.forward(std::move(x));
    return x;
  }

  // Makes a backward that reaches this parameter throw as long as this stage exists, because only
  // another rank has and trains the parameter. Does not keep the parameter alive.
  void refuse_use_of(const NamedTensor& parameter, int stage) {
    if (!parameter.tensor.requires_grad() || is_deferred(parameter.tensor)) return;
    const unsigned hook = parameter.tensor.register_hook(
        [name = parameter.name, stage](const at::Tensor& gradient) -> at::Tensor {
          static_cast<void>(gradient);
          throw pipeline_refusal(
              format("a layer of this rank uses \"{}\" of stage {}, which another rank has and "
                     "trains, without having registered it; register the tensor in both layers, or "
                     "let the layer be a cadre::SharingModule",
                     name, stage));
        });
    refused_.emplace_back(parameter.tensor.getIntrusivePtr(), hook);
  }

  ~StageOfLayers() override {
    for (const auto& [parameter, hook] : refused_) {
      if (auto alive = parameter.lock()) at::Tensor(std::move(alive)).remove_hook(hook);
    }
  }
  StageOfLayers() = default;
  StageOfLayers(const StageOfLayers&) = delete;
  StageOfLayers& operator=(const StageOfLayers&) = delete;

 private:
  std::vector<torch::nn::AnyModule> layers_;
  int num_shared_ = 0;
  std::vector<
      std::pair<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>, unsigned>>
      refused_;
};

// Returns the rank of each stage. Throws for an unknown name of a schedule. The constructor of
// Pipeline throws if the schedule does not support this number of stages.
std::vector<int> ranks_of_stages(const PipelineOptions& options, const StageDivision& division,
                                 int64_t num_layers, int num_ranks) {
  if (const auto* const schedule = std::get_if<PipelineSchedule>(&options.schedule)) {
    if (division.stages_per_rank) {
      throw pipeline_refusal(
          format("stages_per_rank is {}, but the PipelineSchedule has a number of stages of its "
                 "own; leave it out",
                 *division.stages_per_rank));
    }
    return schedule->rank_of_stage;
  }
  const PipelineScheduleInfo info =
      parallel::schedule_of_name(std::get<std::string>(options.schedule)).value_or_throw();
  const int stages_per_rank = division.stages_per_rank.value_or(info.usual_stages_per_rank);
  if (stages_per_rank < 1 || stages_per_rank > num_layers) {
    throw pipeline_refusal(
        format("stages_per_rank is {}, expected from 1 to {}, the number of "
               "layers",
               stages_per_rank, num_layers));
  }
  return place_stages(info.placement, {.num_ranks = num_ranks, .stages_per_rank = stages_per_rank});
}

std::vector<int64_t> sizes_of_stages(const StageDivision& division, int64_t num_layers,
                                     int64_t num_stages) {
  if (num_stages < 1) throw pipeline_refusal("the PipelineSchedule has no stages");
  if (num_layers < num_stages) {
    throw pipeline_refusal(
        format("the model has {} layers, and the schedule {} stages, each of "
               "which needs a layer",
               num_layers, num_stages));
  }
  if (division.layers_per_stage.empty()) {
    std::vector<int64_t> sizes(static_cast<size_t>(num_stages), num_layers / num_stages);
    for (int64_t i = 0; i < num_layers % num_stages; ++i) ++sizes[static_cast<size_t>(i)];
    return sizes;
  }
  int64_t sum = 0;
  for (const int64_t size : division.layers_per_stage) {
    if (size < 1 || size > num_layers) {
      throw pipeline_refusal(
          format("layers_per_stage has the entry {}, expected from 1 to {}", size, num_layers));
    }
    sum += size;
  }
  const auto num_given = static_cast<int64_t>(division.layers_per_stage.size());
  if (num_given == num_stages && sum == num_layers) return division.layers_per_stage;
  throw pipeline_refusal(
      format("layers_per_stage divides {} layers among {} stages, but the model has {} layers and "
             "the schedule {} stages",
             sum, num_given, num_layers, num_stages));
}

std::vector<std::shared_ptr<StageOfLayers>> layers_of_stages(
    const torch::nn::SequentialImpl& layers, const std::vector<int64_t>& sizes) {
  const auto named = layers.named_children();
  auto name = named.begin();
  auto layer = layers.begin();
  std::vector<std::shared_ptr<StageOfLayers>> stages;
  for (const int64_t size : sizes) {
    auto& stage = stages.emplace_back(std::make_shared<StageOfLayers>());
    for (int64_t i = 0; i < size; ++i) stage->add((name++)->key(), *layer++);
    stage->add_shared_modules();
  }
  return stages;
}

// Returns, for each tensor that several stages have, its parameters in the order of the stages.
std::vector<std::vector<StageParameter>> ties_of(
    const std::vector<std::shared_ptr<StageOfLayers>>& stages) {
  std::map<const c10::TensorImpl*, size_t> index_of;
  std::vector<std::vector<StageParameter>> holders;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    for (const NamedTensor& parameter : distinct_parameters(*stages[stage])) {
      const auto [known, is_first] =
          index_of.emplace(parameter.tensor.unsafeGetTensorImpl(), holders.size());
      if (is_first) holders.emplace_back();
      holders[known->second].push_back({static_cast<int>(stage), parameter.name});
    }
  }
  std::erase_if(holders, [](const auto& parameters) { return parameters.size() < 2; });
  return holders;
}

// The memory range of a parameter. A deferred tensor has no address, so its storage object
// identifies its memory.
struct ParameterMemory {
  const void* storage;  // null if `begin` is an address
  uintptr_t begin;
  uintptr_t end;
  int stage;
  std::string name;
  const c10::TensorImpl* tensor;
};

ParameterMemory memory_of(const NamedTensor& parameter, int stage) {
  const at::Tensor& tensor = parameter.tensor;
  const MemoryExtent extent = memory_extent(tensor);
  return {.storage = tensor.is_meta() ? tensor.storage().unsafeGetStorageImpl() : nullptr,
          .begin = reinterpret_cast<uintptr_t>(extent.begin),
          .end = reinterpret_cast<uintptr_t>(extent.end),
          .stage = stage,
          .name = parameter.name,
          .tensor = tensor.unsafeGetTensorImpl()};
}

// Throws if two parameters on different ranks share memory in the whole model. They are two tensors
// with two gradients; in the pipeline they would become two independent weights.
void check_apart(const std::vector<std::shared_ptr<StageOfLayers>>& stages,
                 const std::vector<int>& rank_of_stage) {
  std::vector<ParameterMemory> memories;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    for (const NamedTensor& parameter : distinct_parameters(*stages[stage])) {
      if (parameter.tensor.numel() == 0 || parameter.tensor.layout() != at::kStrided) continue;
      memories.push_back(memory_of(parameter, static_cast<int>(stage)));
    }
  }
  std::ranges::sort(memories, {}, [](const ParameterMemory& memory) {
    return std::pair(reinterpret_cast<uintptr_t>(memory.storage), memory.begin);
  });
  for (size_t i = 0; i < memories.size(); ++i) {
    const ParameterMemory& a = memories[i];
    for (size_t j = i + 1; j < memories.size(); ++j) {
      const ParameterMemory& b = memories[j];
      if (b.storage != a.storage || b.begin >= a.end) break;
      const auto rank_of = [&](const ParameterMemory& e) {
        return rank_of_stage[static_cast<size_t>(e.stage)];
      };
      if (a.tensor == b.tensor || rank_of(a) == rank_of(b)) continue;
      throw pipeline_refusal(
          format("\"{}\" of stage {} and \"{}\" of stage {} share memory, but are two tensors with "
                 "two gradients; register one tensor in both layers, or give them memory of their "
                 "own",
                 a.name, a.stage, b.name, b.stage));
    }
  }
}

// Makes a step throw if it uses a parameter that none of this rank's stages has.
void refuse_use_of_others(const std::vector<std::shared_ptr<StageOfLayers>>& stages,
                          const std::vector<int>& rank_of_stage, int rank) {
  std::set<const c10::TensorImpl*> own;
  StageOfLayers* first = nullptr;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    if (rank_of_stage[stage] != rank) continue;
    if (first == nullptr) first = stages[stage].get();
    for (const NamedTensor& parameter : distinct_parameters(*stages[stage])) {
      own.insert(parameter.tensor.unsafeGetTensorImpl());
    }
  }
  if (first == nullptr) return;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    for (const NamedTensor& parameter : distinct_parameters(*stages[stage])) {
      if (!own.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;
      first->refuse_use_of(parameter, static_cast<int>(stage));
    }
  }
}

// Returns a digest of the names and sizes of the parameters of all stages.
uint64_t digest_of(const std::vector<std::shared_ptr<StageOfLayers>>& stages) {
  Fnv1a hash;
  for (const auto& stage : stages) {
    for (const NamedTensor& parameter : distinct_parameters(*stage)) {
      hash.add(parameter.name);
      for (const int64_t size : parameter.tensor.sizes()) hash.add(static_cast<uint64_t>(size));
    }
  }
  return hash.value();
}

}  // namespace

std::vector<int> parallel::ranks_of_layers(const torch::nn::SequentialImpl& layers,
                                           const PipelineSchedule& schedule) {
  const std::vector<int64_t> sizes = sizes_of_stages(
      {}, static_cast<int64_t>(layers.size()), static_cast<int64_t>(schedule.rank_of_stage.size()));
  std::vector<int> ranks;
  for (size_t stage = 0; stage < sizes.size(); ++stage) {
    ranks.insert(ranks.end(), static_cast<size_t>(sizes[stage]), schedule.rank_of_stage[stage]);
  }
  return ranks;
}

Pipeline pipeline_of(const torch::nn::SequentialImpl& layers, const Ranks& ranks,
                     const PipelineOptions& options, const StageDivision& division) {
  const ProcessGroup& group = ranks.group_of_one_axis("cadre::pipeline_of", "pp");
  std::vector<int> rank_of_stage;
  std::vector<std::shared_ptr<StageOfLayers>> modules;
  check_equal_on_all_ranks(
      group, "cadre::pipeline_of",
      [&]() -> std::vector<AgreedField> {
        const auto num_layers = static_cast<int64_t>(layers.size());
        rank_of_stage = ranks_of_stages(options, division, num_layers, group.world_size());
        const std::vector<int64_t> sizes =
            sizes_of_stages(division, num_layers, static_cast<int64_t>(rank_of_stage.size()));
        modules = layers_of_stages(layers, sizes);
        check_apart(modules, rank_of_stage);
        for (size_t stage = 0; stage < modules.size(); ++stage) {
          if (rank_of_stage[stage] == group.rank()) materialize(*modules[stage]);
        }
        return {
            {"the number of layers in each stage", list_of(sizes)},
            {"the model", format("one whose parameters have the digest {:x}", digest_of(modules))}};
      },
      "pass the same model and division on all ranks");
  const int num_stages = static_cast<int>(modules.size());
  const std::vector<std::vector<StageParameter>> ties = ties_of(modules);
  std::vector<PipelineStage> own;
  for (int stage = 0; stage < num_stages; ++stage) {
    const auto index = static_cast<size_t>(stage);
    if (rank_of_stage[index] != group.rank()) continue;
    own.emplace_back(modules[index], PipelineStageOptions{.stage = stage,
                                                          .num_stages = num_stages,
                                                          .recompute = division.recompute});
  }
  Pipeline pipeline(own, ranks, options);
  for (const std::vector<StageParameter>& parameters : ties) pipeline.tie_parameters(parameters);
  refuse_use_of_others(modules, rank_of_stage, group.rank());
  return pipeline;
}

}  // namespace cadre
