// Makes libtorch's operation batch_norm() use the statistics of all ranks where its parameters or
// running statistics belong to a converted layer. So a module of any type, whose forward() calls
// the operation, is synchronous as it is.
//
// Threads: any. Blocking: the operation does, as batch_statistics.h says. Lifetime: the layer's
// tensors are known as long as the layer exists; the kernel stays registered until the process
// ends. Errors: those of the layer. docs/decisions/0048 says why the operation is taken over.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>

#include "cadre/parallel/batchnorm/normalization.h"
#include "cadre/parallel/batchnorm/synchronous_layer.h"

namespace cadre::batchnorm {

// tensors: weight, bias, running_mean and running_var of the module, as far as it has them.
void make_synchronous(const std::shared_ptr<SynchronousLayer>& layer,
                      std::span<const at::Tensor> tensors);

struct RunningStatistics {
  std::optional<at::Tensor> mean;      // (C), changed in place
  std::optional<at::Tensor> variance;  // (C), changed in place; that of the batch is corrected
  double momentum;
};
// Computes what batch_norm() of the layer computes in training mode. Collective.
at::Tensor synchronous_batch_norm(const std::shared_ptr<SynchronousLayer>& layer,
                                  const at::Tensor& input, const AffineOptions& affine,
                                  const RunningStatistics& running);

}  // namespace cadre::batchnorm
