// Normalizes a batch by the statistics of all ranks. Its backward adds the ranks' gradients of
// these statistics.
//
// Threads: as the group. Blocking: the forward does not block; the backward does, until the group's
// deadline. Errors: cadre::Error in backward: kInvalidArgument for create_graph, on all ranks, and
// those of batch_statistics.h. Source: the gradient of batch normalization, Ioffe and Szegedy,
// https://arxiv.org/abs/1502.03167, section 3, with sums over the batches of all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "cadre/parallel/batchnorm/batch_statistics.h"
#include "cadre/parallel/batchnorm/synchronous_layer.h"

namespace cadre::batchnorm {

struct AffineOptions {
  std::optional<at::Tensor> weight;  // (C); nullopt: 1
  std::optional<at::Tensor> bias;    // (C); nullopt: 0
  double eps;
};

// input: (N, C, ...). Returns a tensor of the same shape, dtype and memory format.
at::Tensor normalize(const std::shared_ptr<const SynchronousLayer>& layer, const at::Tensor& input,
                     const BatchStatistics& statistics, const AffineOptions& affine);

}  // namespace cadre::batchnorm
