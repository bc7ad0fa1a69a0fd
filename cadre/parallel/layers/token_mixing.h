// Recognizes layers of libtorch that combine the tokens of a sequence. A rank that has a part of
// the sequence must not apply such a layer to its part.
//
// Threads: as the module. Blocking: never. Lifetime: keeps nothing. Errors: none.
#pragma once

#include <optional>
#include <string>

namespace torch::nn {
class Module;
}

namespace cadre::layers {

// Returns how the module itself, without the modules in it, combines tokens, for example "attends
// to the tokens of its input". nullopt if it works on each token by itself, or is unknown.
std::optional<std::string> token_mixing_of(const torch::nn::Module& module);

}  // namespace cadre::layers
