#include "cadre/parallel/batchnorm/synchronous_layer.h"

#include "cadre/core/base/format.h"

namespace cadre::batchnorm {

std::string SynchronousLayer::place(std::string_view pass) const {
  return format("synchronous batch normalization \"{}\", rank {}, {}", (*layer_names)[number],
                group.rank(), pass);
}

std::shared_ptr<SynchronousLayer> layer_of(const torch::nn::Module& module) {
  for (const auto& child : module.named_children()) {
    if (child.key() != kChildName) continue;
    return std::dynamic_pointer_cast<SynchronousLayer>(child.value());
  }
  return nullptr;
}

}  // namespace cadre::batchnorm
