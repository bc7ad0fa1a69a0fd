#include "cadre/parallel/tp/parallelize_module.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/embedding.h"
#include "cadre/parallel/layers/module_division.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {
namespace {

[[noreturn]] void refuse(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument, format("parallelize_module: {}", problem));
}

struct PlannedLayer {
  std::string name;
  TensorParallelLayer* layer;
  LayerParallelism how;
};

class Planner {
 public:
  Planner(torch::nn::Module& module, const std::vector<PlanEntry>& plan, const ProcessGroup& group)
      : plan_(plan), group_(group), num_matches_(plan.size()) {
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
  // Returns one field for each layer of Cadre, with the options that must be equal on all ranks.
  const std::vector<AgreedField>& fields() const { return fields_; }

 private:
  static void check_options(const PlanEntry& entry) {
    if (entry.gather_output && entry.style != ParallelStyle::kColwise &&
        entry.style != ParallelStyle::kRowwise) {
      refuse_option(entry, "gather_output", ParallelStyle::kColwise);
    }
    if (!entry.input_is_parallel && entry.style != ParallelStyle::kRowwise) {
      refuse_option(entry, "input_is_parallel = false", ParallelStyle::kRowwise);
    }
  }

  [[noreturn]] static void refuse_option(const PlanEntry& entry, std::string_view option,
                                         ParallelStyle style) {
    refuse(format("the entry \"{}\" ({}) has {}, which only a {} layer obeys; leave it out",
                  entry.pattern, to_string(entry.style), option, to_string(style)));
  }

  void add(const std::string& name, torch::nn::Module& module) {
    ++num_modules_;
    if (!name.empty()) names_ += format(" \"{}\"", name);
    const PlanEntry* const entry = entry_of(name);
    auto* const layer = dynamic_cast<TensorParallelLayer*>(&module);
    if (layer == nullptr) {
      // A ContextParallelLayer such as SelfAttention is not in the plan itself, because the plan
      // names the layers inside of it. Its options must be equal, too.
      const auto* const other = dynamic_cast<const ContextParallelLayer*>(&module);
      if (other != nullptr) fields_.push_back({format("\"{}\"", name), other->options_text()});
    }
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
        plan_layer(name, *layer, {.pattern = name, .style = ParallelStyle::kReplicated});
      }
      return;
    }
    if (layer != nullptr) {
      plan_layer(name, *layer, *entry);
    } else if (entry->style != ParallelStyle::kReplicated) {
      refuse(
          format("the pattern \"{}\" ({}) matches \"{}\", a {}, which is no layer that can be "
                 "divided; make it a cadre::Linear, Embedding, LayerNorm or "
                 "CounterBasedDropout",
                 entry->pattern, to_string(entry->style), name, module.name()));
    }
  }

  void plan_layer(const std::string& name, TensorParallelLayer& layer, const PlanEntry& entry) {
    if (entry.gather_output && entry.style == ParallelStyle::kRowwise &&
        dynamic_cast<const EmbeddingImpl*>(&layer) == nullptr) {
      refuse_option(entry, "gather_output", ParallelStyle::kColwise);
    }
    LayerParallelism how{.group = group_,
                         .style = entry.style,
                         .sequence_parallel = is_sequence_parallel_,
                         .gather_output = entry.gather_output,
                         .input_is_parallel = entry.input_is_parallel};
    fields_.push_back(layer.agreed_field(how, name));
    layers_.push_back({name, &layer, std::move(how)});
  }

  const PlanEntry* entry_of(const std::string& name) {
    const PlanEntry* found = nullptr;
    for (size_t i = 0; i < plan_.size(); ++i) {
      if (!wrap::matches_pattern(plan_[i].pattern, name)) continue;
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
  ProcessGroup group_;
  std::vector<int> num_matches_;
  bool is_sequence_parallel_ = false;
  int num_modules_ = 0;
  std::string names_;
  std::vector<PlannedLayer> layers_;
  std::vector<AgreedField> fields_;
};

// Throws if a module that is not a layer of Cadre has one of the divided parameters: it would use
// this rank's part as if it were the whole parameter.
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

}  // namespace

std::vector<ParameterShard> parallelize_module(torch::nn::Module& module, const Ranks& ranks,
                                               const std::vector<PlanEntry>& plan) {
  const ProcessGroup& group = ranks.group_of_one_axis("parallelize_module", "tp");
  const DeviceMesh mesh = ranks.mesh_with_axis("tp");
  const std::string& axis = mesh.axes()[0].name;
  std::vector<PlannedLayer> layers;
  DividedParameters divided;
  const layers::ModuleDivision division(module, mesh, axis, divided, "parallelize_module");
  check_equal_on_all_ranks(
      group, "parallelize_module",
      [&] {
        const Planner planner(module, plan, group);
        layers = planner.layers();
        for (const PlannedLayer& planned : layers) {
          planned.layer->check(planned.how, planned.name, divided);
        }
        check_divided_only_in_layers(module, divided);
        division.check(group.device());
        return planner.fields();
      },
      "pass the same module and plan on all ranks");
  make_equal(module, group, "parallelize_module");
  for (const PlannedLayer& planned : layers) {
    planned.layer->parallelize(planned.how, planned.name, divided);
  }
  return division.keep_records();
}

std::vector<PlanEntry> tensor_parallel_plan(const torch::nn::Module& module,
                                            const TensorParallelPlanOptions& options) {
  std::vector<PlanEntry> plan;
  const auto add = [&](const std::string& name, const torch::nn::Module& each) {
    const auto* const planned = dynamic_cast<const PlannedModule*>(&each);
    if (planned == nullptr) return;
    for (PlanEntry entry : planned->plan(options)) {
      if (!name.empty()) entry.pattern = format("{}.{}", name, entry.pattern);
      plan.push_back(std::move(entry));
    }
  };
  add("", module);
  for (const auto& child : module.named_modules("", /*include_self=*/false)) {
    add(child.key(), *child.value());
  }
  return plan;
}

}  // namespace cadre
