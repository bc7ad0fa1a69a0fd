// Checks that parameters of a module can be divided among the ranks along one axis of a mesh, and
// later makes the ParameterShards, which say what each rank has. In between the caller, such as
// parallelize_module() or ExpertParallel, divides the parameters.
//
// Threads: one. Blocking: never. Lifetime: refers to what it was made of.
// Errors: kInvalidArgument that begins with the caller, before anything is changed.
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

  // Throws for a problem that would otherwise show only after the first parameters are divided:
  // parameters or buffers without values, a parameter that is divided already or lies on other
  // ranks, and memory that a divided tensor shares with another one, because a rank keeps its part
  // in new memory.
  void check() const;
  // Called after the parameters were divided. Returns their ParameterShards, and stores each
  // division in its parameter with keep_division().
  std::vector<ParameterShard> keep_records() const;

 private:
  [[noreturn]] void refuse(const std::string& problem) const;
  // Returns the dimension of a parameter that the ranks divide; nullopt if they divide none.
  std::optional<int64_t> divided_dim(const at::Tensor& parameter) const;
  // Returns the ParameterShard of a parameter, also on an axis of one rank, which keeps the
  // parameter whole.
  ParameterShard record_of(const NamedTensor& parameter) const;
  // Returns the ParameterShard with the axes along which the parameter was divided before.
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
