// A batch normalization whose statistics are those of the batches of all ranks of a group.
//
// Threads: as the module that it belongs to. Blocking: never. Lifetime: a child of the batch
// normalization that convert_sync_batchnorm() has converted, so it ends with it. It has no
// parameters and no buffers. Errors: none.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cadre/tensor/group/process_group.h"

namespace cadre::batchnorm {

// The name of this child in the converted module.
inline constexpr const char* kChildName = "synchronous";

struct SynchronousLayer final : torch::nn::Module {
  // names: those of all layers that were converted together, in the same order on all ranks.
  SynchronousLayer(ProcessGroup given_group, std::shared_ptr<const std::vector<std::string>> names,
                   size_t given_number, int64_t given_features)
      : group(std::move(given_group)),
        layer_names(std::move(names)),
        number(given_number),
        num_features(given_features) {}

  bool is_alone() const { return group.world_size() == 1; }
  // Returns how errors name the layer and the rank.
  std::string place(std::string_view pass) const;

  const ProcessGroup group;
  const std::shared_ptr<const std::vector<std::string>> layer_names;
  const size_t number;  // the index of this layer in layer_names
  const int64_t num_features;
};

// Returns the layer of a converted module; null if the module was not converted.
std::shared_ptr<SynchronousLayer> layer_of(const torch::nn::Module& module);

}  // namespace cadre::batchnorm
