// Dropout whose mask is a pure function of (seed, step, layer, sample, element). So a model that is
// divided among ranks in any way drops the same elements as one process does. libtorch's dropout
// draws from one generator of the process, whose state depends on what the rank computed before.
//
//   std::shared_ptr stream = std::make_shared<cadre::DropoutStream>();   // all layers share it
//   cadre::CounterBasedDropout dropout(cadre::CounterBasedDropoutOptions{
//       .p = 0.1, .layer = 3, .stream = stream});
//   ...
//   stream->step = step;                    // before each step
//   stream->first_sample = begin_of_batch;  // first of this rank's rows in the batch of all ranks
//
// Forwards with the same stream values, layer and samples have the same mask. So a recomputation of
// a forward (activation checkpointing) gets its mask if the stream still has the same values. The
// backward computes the mask again from the values that the stream had in the forward, and stores
// no mask.
//
// Threads: as the module; the stream is read in forward only.
// Lifetime: modules share the stream. Errors: kInvalidArgument for a probability outside [0, 1] and
// for a region that does not fit the tensor.
// Source: counter-based generators, parallel/layers/philox.h. Megatron-LM and DTensor keep several
// generator states for dropout under tensor parallelism instead.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/layers/context_parallel.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"

namespace cadre {

struct DropoutStream {
  uint64_t seed = 0;
  uint64_t step = 0;
  // The index, in the batch of all ranks, of the first row of this rank's inputs.
  int64_t first_sample = 0;
  // The distance, in the batch of all ranks, from one row of this rank to the next. It is the
  // number of ranks if the rows of the batch are assigned to the ranks in turn (round robin).
  int64_t sample_stride = 1;
};

// Which region of a whole tensor the input is, for example a rank's shard. If `sizes` is empty, the
// input is the whole tensor.
struct DropoutRegion {
  // The sizes of the whole tensor, without the first dimension. `offsets` has the indices in the
  // whole tensor of the input's first element, for the same dimensions. The first dimension counts
  // samples; their offset is DropoutStream::first_sample.
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> offsets = {};
};

// input: (B, ...), floating-point, at least one dimension. An element is kept with probability 1 -
// p and then multiplied by 1 / (1 - p), else it becomes 0, even if it is NaN. p is rounded to a
// multiple of 2^-32. Differentiable any number of times. The mask does not depend on the dtype.
CADRE_EXPORT at::Tensor counter_based_dropout(const at::Tensor& input, double p,
                                              const DropoutStream& stream, uint64_t layer,
                                              const DropoutRegion& region = {});

struct CounterBasedDropoutOptions {
  double p = 0.5;
  // The number of this module, different for each dropout module of the model and the same on all
  // ranks.
  uint64_t layer;
  // The stream that the program shares with its modules; the program sets `step` before each
  // training step.
  std::shared_ptr<const DropoutStream> stream;
  // The size of the last dimension of the whole tensor. Required for kColwise. In other styles it
  // is optional, and an input of another size is then an error.
  std::optional<int64_t> features = {};
};

// Tensor-parallel styles: kSequence for inputs (B, ..., T / ranks, D) that are shards of the
// sequence, kColwise for shards of the last dimension, after a column-parallel layer. After
// set_context_parallel() the input is (B, ..., T, D), where T is the number of this rank's tokens.
class CADRE_EXPORT CounterBasedDropoutImpl : public torch::nn::Module,
                                             public TensorParallelLayer,
                                             public ContextParallelLayer {
 public:
  explicit CounterBasedDropoutImpl(CounterBasedDropoutOptions options);

  // Returns the input itself in evaluation mode.
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;
  std::string options_text() const override;

  CounterBasedDropoutOptions options;

 private:
  void check_options() const;
  std::optional<int64_t> divided_dim(std::string_view parameter,
                                     ParallelStyle style) const override;
  std::optional<std::string> problem_of(const LayerParallelism& how) const override;
  DropoutRegion region_of(const at::Tensor& input) const;
  at::Tensor drop_tokens(const at::Tensor& input, const ContextParallel& sequence) const;
};
TORCH_MODULE(CounterBasedDropout);

}  // namespace cadre
