// The tensor-parallel part of a layer of Cadre: its style, its group, and the parts of parameters
// that this rank keeps. C++ modules have no hooks, so a model can be divided only if its layers are
// types of Cadre: cadre::Linear, Embedding, LayerNorm, CounterBasedDropout. Each has the
// constructors, parameter names, initial values and forward() of the layer in torch::nn. It
// computes the same until it is parallelized, and also afterwards if the group has one rank.
//
// Threads: as the module. Blocking: make_equal() is collective.
// Lifetime: a parallelized layer keeps its group. A divided parameter is still the same tensor, so
// an optimizer that was made before still trains it.
// Errors: kInvalidArgument, with the layer's name, for a style that the layer does not support, a
// second parallelize(), and parameters that already have a gradient. If a constructor with a group
// fails on one rank, all ranks throw.
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

// Activations have the shape (..., T, D): T is the number of tokens of a sequence, D the number of
// features.
enum class ParallelStyle {
  kColwise,  // each rank computes a part of the output features from the whole input
  // Each rank computes with a part of the input features or of the vocabulary, and the results are
  // summed.
  kRowwise,
  kSequence,    // parameters are whole; inputs and outputs are shards along T
  kReplicated,  // parameters, inputs and outputs are whole on every rank
};
CADRE_EXPORT std::string_view to_string(ParallelStyle style);

struct LayerParallelism {
  ProcessGroup group;
  ParallelStyle style;
  // If true, activations between the divided layers are shards along T: column-parallel layers
  // gather their input, and row-parallel layers reduce-scatter their output.
  bool sequence_parallel = false;
  // If true, a kColwise linear layer gathers its output, so that every rank has the whole output; a
  // kRowwise embedding does that with its logits.
  bool gather_output = false;
  // If true, the input of a kRowwise linear layer is divided. If false, every rank has the whole
  // input.
  bool input_is_parallel = true;
};

// The division of one parameter of a parallelized layer. A ParameterShard is made from it.
struct DividedParameter {
  std::vector<int64_t> sizes;  // the sizes of the whole parameter
  // The dimension along which the parameter is divided, as by Shard(dim) of
  // tensor/mesh/placement.h; nullopt if it stays whole.
  std::optional<int64_t> dim;
};
// The division of each parameter, by tensor. A parameter that two layers share is divided once.
using DividedParameters = std::map<const c10::TensorImpl*, DividedParameter>;

class CADRE_EXPORT TensorParallelLayer {
 public:
  virtual ~TensorParallelLayer() = default;

  // Throws if the layer cannot be divided with these options; does not change the layer. Adds the
  // layer's parameters to `divided`, which already has those of earlier layers.
  void check(const LayerParallelism& how, std::string_view name, DividedParameters& divided) const;
  // Keeps this rank's part of each parameter. Called after check(). REQUIRES: the whole parameters
  // are equal on all ranks, see make_equal().
  void parallelize(const LayerParallelism& how, std::string_view name,
                   const DividedParameters& divided);
  bool is_parallelized() const { return parallelism_.has_value(); }
  // Returns the options of the layer, as text, that must be equal on all ranks. The sizes of
  // parameters are compared separately.
  virtual std::string options_text() const { return {}; }
  // Returns a field that the ranks compare (tensor/group/agreement.h): the style and options with
  // which the layer will be divided, under the layer's name.
  AgreedField agreed_field(const LayerParallelism& how, std::string_view name) const;

 protected:
  // Returns the parameters of the layer, as the same tensors that forward() uses.
  virtual std::vector<NamedTensor> parameters_of_layer() const { return {}; }
  // Returns the dimension along which the style divides a parameter; nullopt if the parameter stays
  // whole.
  virtual std::optional<int64_t> divided_dim(std::string_view parameter,
                                             ParallelStyle style) const = 0;
  // Returns why the layer cannot be divided with these options, as the end of a sentence; nullopt
  // if it can.
  virtual std::optional<std::string> problem_of(const LayerParallelism& how) const = 0;

  // Returns null for a layer that is not divided, or whose group has one rank.
  const LayerParallelism* parallelism() const { return computes_alone_ ? nullptr : &*parallelism_; }
  bool has_style(ParallelStyle style) const {
    return !computes_alone_ && parallelism_->style == style;
  }
  // Throws unless the input has `expected` features. Without this check a part of a column-parallel
  // output could be used with whole weights, and libtorch's error about sizes would not explain the
  // cause.
  void check_features(const at::Tensor& input, int64_t expected) const;
  // Called by clone(). Throws if the layer is parallelized, because the copy would have only this
  // rank's part of the parameters.
  void refuse_copy_if_parallelized() const;

 private:
  std::optional<LayerParallelism> parallelism_;
  std::string name_;
  bool computes_alone_ = true;
};

struct PlanEntry {
  // The dotted name of a module. A `*` in it matches any text without dots.
  std::string pattern;
  ParallelStyle style;
  // These options are as in LayerParallelism. A layer to which a changed option does not apply
  // throws.
  bool gather_output = false;
  bool input_is_parallel = true;
};

struct TensorParallelPlanOptions {
  // If true, activations between the divided layers are shards of the sequence.
  bool sequence_parallel = false;
  // If true, logits are gathered, so that every rank has those of the whole vocabulary.
  bool whole_logits = false;
};

// A module that contains layers and has a plan for their division.
class CADRE_EXPORT PlannedModule {
 public:
  virtual ~PlannedModule() = default;
  // Returns entries for the layers in this module, but not for layers inside another PlannedModule
  // in it. The entries name the layers relative to this module.
  virtual std::vector<PlanEntry> plan(const TensorParallelPlanOptions& options) const = 0;
};

// Gives all ranks the parameters and buffers of rank 0. If the ranks' modules differ in names,
// shapes or dtypes, throws the same error on all ranks. `caller` must be static text.
CADRE_EXPORT void make_equal(const torch::nn::Module& module, const ProcessGroup& group,
                             const char* caller);

namespace layers {

// Implements the constructors that parallelize a layer: calls check(), make_equal() and
// parallelize(). If the arguments of one rank are invalid, or options differ between ranks, all
// ranks throw. `type` must be static text. REQUIRES: the layer is a torch::nn::Module.
CADRE_EXPORT void parallelize_new(TensorParallelLayer& layer, const LayerParallelism& how,
                                  const char* type);

// Implements clone() of a layer. `copy` is a new layer with the same options; it gets copies of the
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
