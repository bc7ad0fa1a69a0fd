#include "cadre/parallel/fsdp/unit_assignment.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::parallel {

namespace {

using torch::nn::Module;

[[noreturn]] void refuse_units(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, format("FullyShardedDataParallel: {}", what));
}

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

class Assigner {
 public:
  Assigner(const Module& root, const FullyShardedDataParallelOptions& options)
      : root_(root), options_(options) {}

  UnitAssignment run() {
    choose(root_, "");
    around_.clear();
    assignment_.units.push_back({.name = "", .is_root = true});
    find_owners(root_, "", 0);
    find_ignored();
    for (const NamedTensor& parameter : distinct_parameters(root_)) {
      const void* key = parameter.tensor.unsafeGetTensorImpl();
      if (ignored_.contains(key)) {
        assignment_.ignored.push_back(parameter);
      } else {
        assignment_.units[owner_.at(key)].parameters.push_back(parameter);
      }
    }
    return std::move(assignment_);
  }

 private:
  using Keys = std::set<const void*>;

  // Adds the units among the module and its submodules to chosen_, children first. Returns the
  // parameters of the module that do not belong to one of these units.
  Keys choose(const Module& module, const std::string& name) {
    Keys held;
    around_.push_back(&module);
    for (const auto& child : module.named_children()) {
      held.merge(choose(*child.value(), joined(name, child.key())));
    }
    around_.pop_back();
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
      held.insert(parameter.unsafeGetTensorImpl());
      numel_[parameter.unsafeGetTensorImpl()] = parameter.numel();
    }
    const std::optional<FullyShardOptions> options = choice_for(module, name, held).options();
    if (!options) return held;
    chosen_.try_emplace(&module, *options);
    return {};
  }

  WrapChoice choice_for(const Module& module, const std::string& name, const Keys& held) const {
    const auto* unit = dynamic_cast<const ShardUnitBase*>(&module);
    const bool is_declared = unit != nullptr && unit->binding().is_declared;
    if (unit != nullptr && unit->binding().is_sharded) {
      refuse_units(
          format("{} is a unit of another FullyShardedDataParallel, which has the values of its "
                 "parameters. Use that wrapper; to wrap the model in another way, construct the "
                 "model again and load a snapshot",
                 name.empty() ? "the model" : format("\"{}\"", name)));
    }
    if (&module == &root_) {
      if (!is_declared) return false;
      refuse_units(
          "fully_shard() was called for the model itself. The parameters outside of its units are "
          "a unit by themselves: leave out this call, and pass its options to the wrapper");
    }
    if (is_declared) return unit->binding().options;
    if (!options_.wrap_policy || held.empty()) return false;
    int64_t numel = 0;
    for (const void* key : held) numel += numel_.at(key);
    return options_.wrap_policy({.name = name,
                                 .module = module,
                                 .around = around_,
                                 .numel = numel,
                                 .is_shard_unit = unit != nullptr});
  }

  void find_owners(const Module& module, const std::string& name, size_t unit) {
    if (chosen_.contains(&module)) unit = unit_of(module, name, unit);
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      const void* key = parameter.value().unsafeGetTensorImpl();
      const auto [found, is_new] = owner_.try_emplace(key, unit);
      if (!is_new) found->second = around_both(found->second, unit);
      names_.emplace(joined(name, parameter.key()), key);
    }
    if (const auto* const sharing = dynamic_cast<const SharingModule*>(&module)) {
      if (const auto shared = sharing->shared_module()) add_user(*shared, unit);
    }
    for (const auto& child : module.named_children()) {
      find_owners(*child.value(), joined(name, child.key()), unit);
    }
  }

  // Called if `unit` uses the parameters of a module that is registered elsewhere, as a tied head
  // uses the weight of an embedding. The parameters then belong to a unit around both modules.
  void add_user(const Module& module, size_t unit) {
    for (const at::Tensor& parameter : module.parameters()) {
      const auto [found, is_new] = owner_.try_emplace(parameter.unsafeGetTensorImpl(), unit);
      if (!is_new) found->second = around_both(found->second, unit);
    }
  }

  // Returns the index of the module's unit, which is added at the first call. A module that is
  // registered in two places is one unit.
  size_t unit_of(const Module& module, const std::string& name, size_t parent) {
    const auto [found, is_new] = index_.try_emplace(&module, assignment_.units.size());
    if (is_new) {
      auto* unit = dynamic_cast<ShardUnitBase*>(const_cast<Module*>(&module));
      assignment_.units.push_back(
          {.name = name, .unit = unit, .parent = parent, .options = chosen_.at(&module)});
    }
    return found->second;
  }

  // Returns the innermost unit that contains both units. A parent has a smaller index than its
  // children.
  size_t around_both(size_t a, size_t b) const {
    while (a != b) {
      size_t& inner = a > b ? a : b;
      inner = assignment_.units[inner].parent;
    }
    return a;
  }

  void find_ignored() {
    for (const std::string& ignored : options_.ignored) {
      bool is_found = false;
      for (const auto& [name, key] : names_) {
        if (name != ignored && !name.starts_with(ignored + ".")) continue;
        ignored_.insert(key);
        is_found = true;
      }
      if (!is_found) {
        refuse_units(
            format("options.ignored names \"{}\", but the model has no such parameter and no "
                   "such module with parameters",
                   ignored));
      }
    }
  }

  const Module& root_;
  const FullyShardedDataParallelOptions& options_;
  UnitAssignment assignment_;
  std::vector<const Module*> around_;  // the modules around the one that choose() is called for
  std::unordered_map<const Module*, FullyShardOptions> chosen_;
  std::unordered_map<const Module*, size_t> index_;
  std::unordered_map<const void*, size_t> owner_;
  std::unordered_map<const void*, int64_t> numel_;
  std::map<std::string, const void*> names_;
  Keys ignored_;
};

}  // namespace

UnitAssignment assign_units(const std::shared_ptr<Module>& root,
                            const FullyShardedDataParallelOptions& options) {
  return Assigner(*root, options).run();
}

std::vector<std::vector<size_t>> flats_of_unit(std::span<const ParameterSize> parameters) {
  std::map<DType, std::vector<size_t>> by_dtype;
  for (size_t i = 0; i < parameters.size(); ++i) by_dtype[parameters[i].dtype].push_back(i);
  std::vector<std::vector<size_t>> flats;
  for (auto& [dtype, members] : by_dtype) flats.push_back(std::move(members));
  return flats;
}

}  // namespace cadre::parallel
