#include "cadre/parallel/tp/parallelize_module.h"

#include <ATen/ops/tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>

#include "cadre/base/error.h"
#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/layers/common_refusal.h"

namespace cadre {
namespace {

[[noreturn]] void refuse(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("parallelize_module: {}", problem));
}

// On a mismatch only the last star takes another character. Earlier ones need not: the text between
// two stars has matched as early as it can, and if it has a dot, it can match in one place only. So
// the time is at most the product of the lengths.
bool matches(std::string_view pattern, std::string_view name) {
  size_t at = 0;       // in the pattern
  size_t in_name = 0;  // before which the pattern up to `at` matches
  std::optional<size_t> last_star;
  size_t star_end = 0;  // in the name: of what the last star has taken
  while (in_name < name.size()) {
    if (at < pattern.size() && pattern[at] == '*') {
      last_star = at++;
      star_end = in_name;
    } else if (at < pattern.size() && pattern[at] == name[in_name]) {
      ++at;
      ++in_name;
    } else if (last_star && name[star_end] != '.') {
      in_name = ++star_end;
      at = *last_star + 1;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', at) == std::string_view::npos;
}

struct PlannedLayer {
  std::string name;
  TensorParallelLayer* layer;
  PlanEntry entry;
};

class Planner {
 public:
  Planner(torch::nn::Module& module, const std::vector<PlanEntry>& plan)
      : plan_(plan), num_matches_(plan.size()) {
    is_sequence_parallel_ = std::ranges::any_of(
        plan, [](const PlanEntry& entry) { return entry.style == ParallelStyle::kSequence; });
    std::ranges::for_each(plan, check_options);
    add("", module);
    for (const auto& child : module.named_modules("", /*include_self=*/false)) {
      add(child.key(), *child.value());
    }
    for (size_t i = 0; i < plan.size(); ++i) {
      if (num_matches_[i] > 0) continue;
      refuse(
          format("the pattern \"{}\" ({}) matches none of the {} modules in the module; their "
                 "names are{}",
                 plan[i].pattern, to_string(plan[i].style), num_modules_, names_));
    }
  }

  const std::vector<PlannedLayer>& layers() const { return layers_; }
  bool is_sequence_parallel() const { return is_sequence_parallel_; }

 private:
  static void check_options(const PlanEntry& entry) {
    const auto refuse_option = [&](std::string_view option, ParallelStyle style) {
      refuse(format("the entry \"{}\" ({}) has {}, which only a {} layer obeys; leave it out",
                    entry.pattern, to_string(entry.style), option, to_string(style)));
    };
    if (entry.gather_output && entry.style != ParallelStyle::kColwise) {
      refuse_option("gather_output", ParallelStyle::kColwise);
    }
    if (!entry.input_is_parallel && entry.style != ParallelStyle::kRowwise) {
      refuse_option("input_is_parallel = false", ParallelStyle::kRowwise);
    }
  }

  void add(const std::string& name, torch::nn::Module& module) {
    ++num_modules_;
    if (!name.empty()) names_ += format(" \"{}\"", name);
    const PlanEntry* const entry = entry_of(name);
    auto* const layer = dynamic_cast<TensorParallelLayer*>(&module);
    if (entry == nullptr) {
      const bool has_parameters = !module.named_parameters(/*recurse=*/false).is_empty();
      if (is_sequence_parallel_ && (has_parameters || layer != nullptr)) {
        refuse(
            format("no pattern of the plan matches \"{}\", {}. The plan is sequence-parallel, so "
                   "name it kSequence if its inputs are shards of the sequence, and kReplicated if "
                   "they are whole sequences",
                   name, has_parameters ? "which has parameters" : "whose style matters"));
      }
      if (layer != nullptr) {
        layers_.push_back({name, layer, {.pattern = name, .style = ParallelStyle::kReplicated}});
      }
      return;
    }
    if (layer != nullptr) {
      layers_.push_back({name, layer, *entry});
    } else if (entry->style != ParallelStyle::kReplicated) {
      refuse(
          format("the pattern \"{}\" ({}) matches \"{}\", a {}, which is no layer that can be "
                 "divided; make it a cadre::Linear, Embedding, LayerNorm or "
                 "CounterBasedDropout",
                 entry->pattern, to_string(entry->style), name, module.name()));
    }
  }

  const PlanEntry* entry_of(const std::string& name) {
    const PlanEntry* found = nullptr;
    for (size_t i = 0; i < plan_.size(); ++i) {
      if (!matches(plan_[i].pattern, name)) continue;
      ++num_matches_[i];
      if (found != nullptr) {
        refuse(format("two patterns, \"{}\" ({}) and \"{}\" ({}), match \"{}\"", found->pattern,
                      to_string(found->style), plan_[i].pattern, to_string(plan_[i].style), name));
      }
      found = &plan_[i];
    }
    return found;
  }

  const std::vector<PlanEntry>& plan_;
  std::vector<int> num_matches_;
  bool is_sequence_parallel_ = false;
  int num_modules_ = 0;
  std::string names_;
  std::vector<PlannedLayer> layers_;
};

// A module that is no layer of Cadre's would compute with a part as if it were the whole.
void check_divided_only_in_layers(const torch::nn::Module& module,
                                  const DividedParameters& divided) {
  const auto check = [&](const std::string& name, const torch::nn::Module& each) {
    if (dynamic_cast<const TensorParallelLayer*>(&each) != nullptr) return;
    for (const auto& parameter : each.named_parameters(/*recurse=*/false)) {
      const auto known = divided.find(parameter.value().unsafeGetTensorImpl());
      if (known == divided.end() || !known->second.dim) continue;
      refuse(
          format("the parameter \"{}\" of \"{}\" is also one that the plan divides, but a {} "
                 "computes with whole parameters; use a layer of Cadre's there, for a tied head "
                 "Embedding::logits() or a cadre::Linear that is kColwise, or a parameter of its "
                 "own",
                 parameter.key(), name, each.name()));
    }
  };
  check("", module);
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    check(child.key(), *child.value());
  }
}

// The same sentence on all ranks if they differ in what becomes of any layer.
void check_plans_match(const std::vector<PlannedLayer>& layers, const ProcessGroup& group) {
  Fnv1a digest;
  for (const PlannedLayer& planned : layers) {
    digest.add(planned.name);
    digest.add(to_string(planned.entry.style));
    digest.add(planned.entry.gather_output ? 1 : 0);
    digest.add(planned.entry.input_is_parallel ? 1 : 0);
  }
  const auto number = static_cast<int64_t>(digest.value());
  // The largest of a number and of its complement are complements only if all numbers are equal.
  const at::Tensor largest = at::tensor({number, ~number}, at::kLong);
  group.all_reduce(largest, {.op = ReduceOp::kMax});
  const int64_t* const values = largest.const_data_ptr<int64_t>();
  if (values[0] == ~values[1]) return;
  refuse(format("the plans of the {} ranks of group \"{}\" differ; pass the same one on all",
                group.world_size(), group.name()));
}

std::vector<ParameterShard> records_of(const torch::nn::Module& module, const DeviceMesh& mesh,
                                       const DividedParameters& divided) {
  std::vector<ParameterShard> records;
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    const auto known = divided.find(parameter.tensor.unsafeGetTensorImpl());
    const bool is_divided = known != divided.end() && known->second.dim.has_value();
    records.push_back(
        {.name = parameter.name,
         .sizes = known == divided.end() ? parameter.tensor.sizes().vec() : known->second.sizes,
         .mesh = mesh,
         .placements = {is_divided ? Placement(Shard(*known->second.dim)) : Replicate()},
         .flat_axis = {},
         .range = {.begin = 0, .end = parameter.tensor.numel()},
         .values = parameter.tensor,
         .parameter = parameter.tensor});
    if (is_divided && mesh.size() > 1) {
      keep_division(records.back());
    } else {
      records.back() = on_joint_mesh(records.back(), division_of(parameter).get());
    }
  }
  return records;
}

}  // namespace

std::vector<ParameterShard> parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh,
                                               const std::vector<PlanEntry>& plan) {
  if (mesh.axes().size() != 1) {
    refuse(format("the mesh {} has {} axes; pass the one for tensor parallelism: mesh[\"tp\"]",
                  mesh.to_string(), mesh.axes().size()));
  }
  const ProcessGroup& group = mesh.group(mesh.axes()[0].name);
  std::optional<Planner> planner;
  const auto parallelism_of = [&](const PlanEntry& entry) {
    return LayerParallelism{.group = group,
                            .style = entry.style,
                            .sequence_parallel = planner->is_sequence_parallel(),
                            .gather_output = entry.gather_output,
                            .input_is_parallel = entry.input_is_parallel};
  };
  DividedParameters divided;
  layers::check_on_all_ranks(group, [&] {
    planner.emplace(module, plan);
    for (const PlannedLayer& planned : planner->layers()) {
      planned.layer->check(parallelism_of(planned.entry), planned.name, divided);
    }
    check_divided_only_in_layers(module, divided);
  });
  if (group.world_size() > 1) check_plans_match(planner->layers(), group);
  make_equal(module, group, "parallelize_module");
  for (const PlannedLayer& planned : planner->layers()) {
    planned.layer->parallelize(parallelism_of(planned.entry), planned.name, divided);
  }
  return records_of(module, mesh, divided);
}

}  // namespace cadre
