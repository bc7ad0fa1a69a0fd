// Determines which modules of a model are units, and to which unit each parameter belongs.
//
// Lifetime: shares the tensors; the results point to modules that the root module owns. Errors:
// kInvalidArgument for a unit of another wrapper, for fully_shard() of the root module, and for a
// name in options.ignored that the model does not have. A parameter belongs to the innermost unit
// around the module that registered it. A parameter that several modules registered (a tied weight)
// belongs to the innermost unit around all of them, or else to the root. There it is gathered
// whenever one of these modules computes.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/fsdp/shard_unit.h"
#include "cadre/parallel/shard/flat_layout.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::parallel {

struct AssignedUnit {
  std::string name;  // the name of the module; "" for the root
  bool is_root = false;
  ShardUnitBase* unit = nullptr;   // is null for the root and for a module that is no ShardUnit
  size_t parent = 0;               // the index of the innermost unit around this one
  FullyShardOptions options = {};  // those of fully_shard(), or else those of the policy
  // The parameters, each once, in the order of named_parameters(). A tied parameter has the first
  // of its names there.
  std::vector<NamedTensor> parameters = {};
};

struct UnitAssignment {
  // The root is the first unit; the others follow in the order of named_modules().
  std::vector<AssignedUnit> units;
  std::vector<NamedTensor> ignored;
};

// Divides a unit's parameters by dtype, because one FlatParameters has one dtype. Returns the
// indices of the parameters of each FlatParameters.
std::vector<std::vector<size_t>> flats_of_unit(std::span<const ParameterSize> parameters);

CADRE_EXPORT UnitAssignment assign_units(const std::shared_ptr<torch::nn::Module>& root,
                                         const FullyShardedDataParallelOptions& options);

}  // namespace cadre::parallel
