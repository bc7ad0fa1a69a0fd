// Checks that parameters of a module can be divided among the ranks along one axis of a mesh, and
// later makes their ParameterShards, which say which part each rank has. Between these two steps
// the caller, such as parallelize_module() or ExpertParallel, divides the parameters.
//
// Lifetime: refers to the constructor's arguments.
// Errors: kInvalidArgument, before anything is changed. The message begins with the name of the
// caller.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/parallel/layers/tensor_parallel_layer.h"
#include "cadre/parallel/shard/parameter_shard.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/device_mesh.h"

namespace cadre::layers {

class ModuleDivision {
 public:
  ModuleDivision(const torch::nn::Module& module, const DeviceMesh& mesh, std::string axis,
                 const DividedParameters& divided, std::string_view caller);

  // Throws for problems that would otherwise appear only after the first parameters were divided:
  // parameters or buffers without values or on a device on which the group does not work
  // (`of_group`: ProcessGroup::device()), a parameter that is divided already or is distributed
  // over other ranks, and a divided tensor that shares memory with another tensor, because a rank
  // copies its part to new memory.
  void check(std::optional<c10::Device> of_group) const;
  // Called after the parameters were divided. Returns their ParameterShards, and records in each
  // parameter how it is divided, with keep_division().
  std::vector<ParameterShard> keep_records() const;

 private:
  [[noreturn]] void refuse(const std::string& problem) const;
  // Returns the dimension along which the ranks divide a parameter; nullopt if the parameter stays
  // whole.
  std::optional<int64_t> divided_dim(const at::Tensor& parameter) const;
  // Returns the ParameterShard of a parameter, also on an axis of one rank, where the parameter
  // stays whole.
  ParameterShard record_of(const NamedTensor& parameter) const;
  // Returns the ParameterShard that also has the axes along which the parameter was divided
  // earlier.
  ParameterShard joint_record_of(const NamedTensor& parameter) const;
  bool is_cut(const NamedTensor& parameter) const;
  void check_values(const std::vector<NamedTensor>& tensors) const;
  void check_memory(std::vector<NamedTensor> tensors) const;

  const torch::nn::Module& module_;
  const DeviceMesh& mesh_;
  std::string axis_;
  const DividedParameters& divided_;
  std::string_view caller_;
};

}  // namespace cadre::layers
