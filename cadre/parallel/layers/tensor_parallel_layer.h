// The tensor-parallel part of a layer of Cadre: a style, a group, and the parameters that this rank
// keeps. C++ modules have no hooks, so the layers of a model that is to be divided are types of
// Cadre: cadre::Linear, Embedding, LayerNorm, CounterBasedDropout. Each has the constructors,
// parameter names, initial values and forward() of the layer of torch::nn, and computes the same
// until it is parallelized; also afterwards if the group has one rank.
//
// Threads: as the module. Blocking: parallelize() never; make_equal() is collective.
// Lifetime: a parallelized layer keeps its group. A parameter stays the same tensor when it is
// divided, so an optimizer that was made before has it.
// Errors: kInvalidArgument with the layer's name, of a constructor with a group on all ranks, for a
// style that the layer does not have, a second parallelize(), and parameters that have a gradient
// already.
// Source: Megatron-LM, https://arxiv.org/abs/1909.08053 and, for sequence parallelism,
// https://arxiv.org/abs/2205.05198; the styles of torch.distributed.tensor.parallel.
// docs/decisions/0016-tensor-parallel.md.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

struct AgreedField;

// Activations are (..., T, D): T counts the tokens of a sequence, D the features.
enum class ParallelStyle {
  kColwise,  // each rank computes a part of the output features from the whole input
  // Each rank computes from a part of the input features or vocabulary, and the results are summed.
  kRowwise,
  kSequence,    // the parameters are whole; inputs and outputs are shards along T
  kReplicated,  // the parameters, inputs and outputs are whole on every rank
};
CADRE_EXPORT std::string_view to_string(ParallelStyle style);

struct LayerParallelism {
  ProcessGroup group;
  ParallelStyle style;
  // Activations between the divided layers are shards along T. Then column-parallel layers gather
  // their input, and row-parallel layers reduce-scatter their output.
  bool sequence_parallel = false;
  // The output of a kColwise linear layer is gathered, so that every rank has the whole output.
  bool gather_output = false;
  // The input of a kRowwise linear layer is divided. If false, every rank has the whole input.
  bool input_is_parallel = true;
};

// A parameter of a parallelized layer, of which a ParameterShard is made.
struct DividedParameter {
  std::vector<int64_t> sizes;  // the sizes of the whole parameter
  // The dimension that is divided, as by Shard(dim) of tensor/mesh/placement.h.
  std::optional<int64_t> dim;
};
// The divided parameters, by tensor; a parameter that two layers share is divided once.
using DividedParameters = std::map<const c10::TensorImpl*, DividedParameter>;

class CADRE_EXPORT TensorParallelLayer {
 public:
  virtual ~TensorParallelLayer() = default;

  // Throws if the layer cannot be divided in this way, and changes nothing in it. Adds its
  // parameters to `divided`, which contains those of earlier layers.
  void check(const LayerParallelism& how, std::string_view name, DividedParameters& divided) const;
  // Keeps this rank's part of each parameter, after check(). The whole parameters are equal on all
  // ranks: see make_equal().
  void parallelize(const LayerParallelism& how, std::string_view name,
                   const DividedParameters& divided);
  bool is_parallelized() const { return parallelism_.has_value(); }
  // Returns the options of the layer that must be equal on all ranks. The sizes of its parameters
  // are compared in addition.
  virtual std::string options_text() const { return {}; }
  // Returns the parallelism and the layer's name as a field of tensor/group/agreement.h.
  AgreedField agreed_field(const LayerParallelism& how, std::string_view name) const;

 protected:
  // Returns the members themselves, which forward() uses.
  virtual std::vector<NamedTensor> parameters_of_layer() const { return {}; }
  // Returns the dimension along which the style divides a parameter; nullopt if the parameter stays
  // whole.
  virtual std::optional<int64_t> divided_dim(std::string_view parameter,
                                             ParallelStyle style) const = 0;
  // Returns why the layer cannot be divided in this way, as the end of a sentence; nullopt if it
  // can.
  virtual std::optional<std::string> problem_of(const LayerParallelism& how) const = 0;

  // Returns null for a layer that computes alone.
  const LayerParallelism* parallelism() const { return computes_alone_ ? nullptr : &*parallelism_; }
  bool has_style(ParallelStyle style) const {
    return !computes_alone_ && parallelism_->style == style;
  }
  // Throws unless the input has `expected` features. Without this check, a part of a
  // column-parallel output could be used with weights for the whole output, and libtorch's error
  // would not explain that.
  void check_features(const at::Tensor& input, int64_t expected) const;
  // Called by clone(). Throws if the layer is parallelized, because a copy would not know of the
  // division.
  void refuse_copy_if_parallelized() const;

 private:
  std::optional<LayerParallelism> parallelism_;
  std::string name_;
  bool computes_alone_ = true;
};

struct PlanEntry {
  // The dotted name of a module; `*` in it stands for any characters but dots.
  std::string pattern;
  ParallelStyle style;
  // As in LayerParallelism. Layers to which they do not apply throw if they are set.
  bool gather_output = false;
  bool input_is_parallel = true;
};

struct TensorParallelPlanOptions {
  // Activations between the divided layers are shards of the sequence.
  bool sequence_parallel = false;
};

// A module that consists of layers and knows how ranks divide them.
class CADRE_EXPORT PlannedModule {
 public:
  virtual ~PlannedModule() = default;
  // Returns entries for the layers in this module, but not for those in another PlannedModule that
  // is in it. Patterns are names in this module.
  virtual std::vector<PlanEntry> plan(const TensorParallelPlanOptions& options) const = 0;
};

// Throws the same sentence on all ranks if the ranks' modules differ in names, shapes or dtypes;
// else gives all ranks the parameters and buffers of rank 0. caller: static text.
CADRE_EXPORT void make_equal(const torch::nn::Module& module, const ProcessGroup& group,
                             const char* caller);

namespace layers {

// Makes a layer parallel in its constructor: check(), make_equal() and parallelize(). If the
// arguments of one rank are invalid, or options differ between ranks, all ranks throw. `type` is
// static text. REQUIRES: the layer is a torch::nn::Module.
CADRE_EXPORT void parallelize_new(TensorParallelLayer& layer, const LayerParallelism& how,
                                  const char* type);

// Implements clone() of a layer: gives `copy`, a new layer with the same options, copies of the
// parameters.
template <typename Layer>
std::shared_ptr<torch::nn::Module> with_parameters_of(const Layer& layer,
                                                      const std::shared_ptr<Layer>& copy,
                                                      const std::optional<c10::Device>& device) {
  for (const auto& parameter : layer.named_parameters(/*recurse=*/false)) {
    const at::Tensor data = parameter.value().detach();
    copy->named_parameters(/*recurse=*/false)[parameter.key()].set_data(
        device ? data.to(*device, data.scalar_type(), /*non_blocking=*/false, /*copy=*/true)
               : data.clone());
  }
  copy->train(layer.is_training());
  return copy;
}

}  // namespace layers

}  // namespace cadre
