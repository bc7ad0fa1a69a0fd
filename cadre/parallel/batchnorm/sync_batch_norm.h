// Synchronous batch normalization: in training mode, mean and variance of each channel are those of
// the batches of all ranks together, as in one process with the whole batch.
//
//   auto net = std::make_shared<ResNet>();                   // has torch::nn::BatchNorm2d members
//   cadre::convert_sync_batchnorm(*net, world);
//   cadre::DistributedDataParallel model{net, world};
//
// Threads: each rank converts and calls its modules from one thread. Blocking: the conversion is
// collective; a forward in training mode waits for the other ranks, and so does its backward, until
// the group's deadline. Lifetime: the converted modules keep a group of their own. Errors:
// cadre::Error, on all ranks. All ranks run the same layers in the same order. A backward with
// create_graph is refused. Source: torch.nn.SyncBatchNorm.
#pragma once

#include <torch/nn/modules/batchnorm.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/mesh/ranks.h"

namespace cadre {

// Makes each torch::nn::BatchNorm1d, 2d and 3d and each SyncBatchNorm of the module synchronous
// over the ranks, and returns their names. The modules stay the same objects, with the same names
// of parameters and buffers, so it does not matter how the model holds them. In eval mode, and in a
// group of one rank, they compute as before. Convert the module before it is wrapped; Module::to()
// may be called before or after. A converted module cannot be cloned.
//
// Throws kInvalidArgument on all ranks for a layer without weight and without running statistics,
// for one that was converted before, and if the ranks' modules have other layers.
CADRE_EXPORT std::vector<std::string> convert_sync_batchnorm(torch::nn::Module& module,
                                                             const Ranks& ranks);

// Batch normalization of inputs (N, C, ...) of any number of dimensions, which must be converted by
// convert_sync_batchnorm(); until then forward() throws in training mode. Unlike a converted
// BatchNorm of libtorch, it also takes a batch that has a single value for each channel on this
// rank.
class CADRE_EXPORT SyncBatchNormImpl
    : public torch::nn::NormImplBase<1, SyncBatchNormImpl, torch::nn::BatchNormOptions> {
 public:
  explicit SyncBatchNormImpl(int64_t num_features)
      : SyncBatchNormImpl(torch::nn::BatchNormOptions(num_features)) {}
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& norm_options);

  // input: (N, C, ...), N >= 0. Returns a tensor of the same shape and dtype.
  at::Tensor forward(const at::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

 protected:
  void _check_input_dim(const at::Tensor& input) override;
};
TORCH_MODULE(SyncBatchNorm);

}  // namespace cadre
