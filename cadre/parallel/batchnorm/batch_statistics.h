// Mean and variance of each channel over the batches of all ranks, exchanged once in forward.
//
// Each rank computes the mean and the sum of squared deviations of its own batch, and the ranks
// combine them by Chan's formula, weighted by the ranks' numbers of values, in rank order and in
// float64. So unequal batches, and empty ones, are right, and all ranks have the same bits. One
// all_gather of 8 * (4 + 2 * channels) bytes for each rank.
//
// Threads: as the group. Blocking: until the group's deadline; on a device also until the device
// has computed this rank's message. Errors: cadre::Error, on all ranks if it can be known on all:
// kAborted on the others if one rank throws before the exchange, kInvalidArgument if the ranks are
// in different layers, or if their batches have fewer than two values for a channel together.
// Source: Chan, Golub, LeVeque, Updating formulae and a pairwise algorithm, 1979; PyTorch's
// SyncBatchNorm.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <string_view>
#include <vector>

#include "cadre/parallel/batchnorm/synchronous_layer.h"

namespace cadre::batchnorm {

struct BatchStatistics {
  at::Tensor mean;      // (C), float32, or float64 for an input of float64
  at::Tensor variance;  // (C), not corrected, of the same dtype
  double count = 0;     // the number of values of a channel on all ranks
};

// Returns the dtype in which statistics of such inputs are computed.
at::ScalarType statistics_dtype(at::ScalarType input);
// Returns all dimensions of an input (N, C, ...) but that of the channels.
std::vector<int64_t> dims_of_values(const at::Tensor& input);
// Returns values (C) in a shape that broadcasts to the input.
at::Tensor for_channels(const at::Tensor& values, const at::Tensor& input);

struct InputUse {
  bool needs_gradient;  // whether a backward will compute the gradient of the input
};
// input: (N, C, ...); N may be 0.
BatchStatistics exchange_statistics(const SynchronousLayer& layer, const at::Tensor& input,
                                    const InputUse& use);

// Throws on a rank that is in the exchange of a layer in which another rank has failed.
[[noreturn]] void refuse_failed_peer(const SynchronousLayer& layer, std::string_view pass,
                                     int culprit);

}  // namespace cadre::batchnorm
