// Records in an archive of torch::save() which shards' optimizer state it has. The archive fits
// only the rank that saved it, although all ranks may have shards of the same sizes.
//
// Threads: one. Blocking: never. Lifetime: keeps nothing. Errors: kInvalidArgument from
// check_part(), with the rank of the archive and what to load instead.
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

// Records in the archive to which shards the optimizer state in it belongs: the rank, the number of
// ranks, a digest of the groups by parameter name, and a digest of this rank's elements. Writes
// nothing if no parameter is a shard.
CADRE_EXPORT void write_part(torch::serialize::OutputArchive& archive, const ParamGroups& groups);

enum class PartRule : uint8_t {
  kRequired,
  kIfWritten,  // also accepts an archive of torch::optim, which does not name the rank
};
// Throws unless write_part() has written the description of the same shards for these groups.
// `optimizer` is the name with which the message begins.
CADRE_EXPORT void check_part(torch::serialize::InputArchive& archive, const ParamGroups& groups,
                             std::string_view optimizer, PartRule rule = PartRule::kRequired);

// An optimizer whose save() calls write_part().
template <typename O>
concept SavesPart = requires { requires O::kSavesPart; };

}  // namespace cadre::optim_state
