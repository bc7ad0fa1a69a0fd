// Records in an archive of torch::save() to which rank's shards its optimizer state belongs, and
// checks that at loading. The archive of another rank would load without an error otherwise,
// because the shards of all ranks may have the same sizes.
//
// Threads: one. Blocking: never. Lifetime: keeps nothing. Errors: kInvalidArgument from
// check_part(), with the rank in the archive and the advice which file to load instead.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"

namespace torch {
namespace optim {
class OptimizerParamGroup;
}
namespace serialize {
class InputArchive;
class OutputArchive;
}  // namespace serialize
}  // namespace torch

namespace cadre::optim_state {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// Writes to the archive to which shards its optimizer state belongs: the rank, the number of ranks,
// a hash of the groups' parameter names and a hash of which elements this rank has. Writes nothing
// if no parameter is a shard.
CADRE_EXPORT void write_part(torch::serialize::OutputArchive& archive, const ParamGroups& groups);

enum class PartRule : uint8_t {
  kRequired,
  kIfWritten,  // also accepts an archive of torch::optim, which does not name the rank
};
// Throws unless write_part() has written the same description when the archive was saved.
// `optimizer` is the name with which the message begins.
CADRE_EXPORT void check_part(torch::serialize::InputArchive& archive, const ParamGroups& groups,
                             std::string_view optimizer, PartRule rule = PartRule::kRequired);

// True for an optimizer class whose save() calls write_part().
template <typename O>
concept SavesPart = requires { requires O::kSavesPart; };

}  // namespace cadre::optim_state
