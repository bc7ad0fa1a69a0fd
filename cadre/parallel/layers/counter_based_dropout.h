// Dropout whose mask is a pure function of (seed, step, layer, sample, element), so a model that is
// divided among ranks in any way drops the same elements as one process. libtorch's dropout draws
// from one generator of the process, whose state depends on what this rank computed before.
//
//   std::shared_ptr stream = std::make_shared<cadre::DropoutStream>();   // all layers share it
//   cadre::CounterBasedDropout dropout(cadre::CounterBasedDropoutOptions{
//       .p = 0.1, .layer = 3, .stream = stream});
//   ...
//   stream->step = step;                    // before each step
//   stream->first_sample = begin_of_batch;  // first of this rank's rows in the batch of all ranks
//
// A forward with the same stream, layer and samples gives the same mask. So a recomputation gets
// the mask of its forward if the stream still has the values of that forward. The backward does not
// keep the mask, but computes it again from the values of its forward.
//
// Threads: as the module; the stream is read in forward only. Blocking: never.
// Lifetime: modules share the stream. Errors: kInvalidArgument for a probability outside [0, 1] and
// for a region that does not fit the tensor.
// Source: counter-based generators, parallel/layers/philox.h; Megatron-LM's and DTensor's dropout
// under tensor parallelism keep several generator states instead.
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
  // The index of the first row of this rank's inputs in the batch of the step.
  int64_t first_sample = 0;
  // The distance of one row from the next. It is the number of ranks if they have the rows of the
  // batch in turn.
  int64_t sample_stride = 1;
};

// The region of a whole tensor that an input holds. If `sizes` is empty, the input is the whole
// tensor.
struct DropoutRegion {
  // Has for each dimension but the first its size in the whole tensor. `offsets` has the index
  // there of the input's first element. The first dimension counts samples, whose offset is in the
  // stream.
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> offsets = {};
};

// input: (B, ...), floating-point, at least one dimension. Elements are kept with probability 1 - p
// and multiplied by 1 / (1 - p); dropped ones are 0, whatever they were. p counts in multiples of
// 2^-32. Has a backward of every order. The mask does not depend on the dtype.
CADRE_EXPORT at::Tensor counter_based_dropout(const at::Tensor& input, double p,
                                              const DropoutStream& stream, uint64_t layer,
                                              const DropoutRegion& region = {});

struct CounterBasedDropoutOptions {
  double p = 0.5;
  // The number of this module. Each module of the model has another one, and all ranks have the
  // same.
  uint64_t layer;
  // The program shares it, and sets its step before each step.
  std::shared_ptr<const DropoutStream> stream;
  // The size of the last dimension of the whole tensor. It is needed for kColwise; in other styles,
  // if it is given, an input of another size is an error.
  std::optional<int64_t> features = {};
};

// Tensor-parallel styles: kSequence for inputs (B, ..., T / ranks, D) that are shards of the
// sequence, kColwise for shards of the last dimension, after a column-parallel layer. After
// set_context_parallel() the input is (B, ..., T, D), where T counts this rank's tokens.
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
