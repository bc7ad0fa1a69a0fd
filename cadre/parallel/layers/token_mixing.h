// Recognizes layers of libtorch that combine several tokens of a sequence. If ranks divide a
// sequence, they must not apply such a layer to their parts.
#pragma once

#include <optional>
#include <string>

namespace torch::nn {
class Module;
}

namespace cadre::layers {

// Returns how the module combines tokens, as a clause such as "attends to the tokens of its input";
// submodules are not considered. Returns nullopt if the module processes each token separately, or
// is of an unknown type.
std::optional<std::string> token_mixing_of(const torch::nn::Module& module);

}  // namespace cadre::layers
