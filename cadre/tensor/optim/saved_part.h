// Which shards an archive of torch::save() has the optimizer state of: it fits the rank that has
// saved it, and all ranks may have shards of the same sizes.
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

// Adds to the archive which shards the parameters of the groups are: the rank, the number of ranks,
// and digests of the groups by name and of this rank's elements. Nothing if none is a shard.
CADRE_EXPORT void write_part(torch::serialize::OutputArchive& archive, const ParamGroups& groups);

enum class PartRule : uint8_t {
  kRequired,
  kIfWritten,  // also an archive of torch::optim fits, which does not say whose it is
};
// Throws unless write_part() has written the same for these groups. `optimizer`: with which the
// message begins.
CADRE_EXPORT void check_part(torch::serialize::InputArchive& archive, const ParamGroups& groups,
                             std::string_view optimizer, PartRule rule = PartRule::kRequired);

// An optimizer whose save() calls write_part().
template <typename O>
concept SavesPart = requires { requires O::kSavesPart; };

}  // namespace cadre::optim_state
