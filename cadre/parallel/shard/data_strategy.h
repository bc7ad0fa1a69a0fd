// What the ranks that have different rows of a batch do with the model: the strategies of memory
// plans, of verifications and of the trainer, and their names; and the form of shards.
//
// Threads: plain functions.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "cadre/core/base/export.h"

namespace cadre {

enum class DataStrategy : uint8_t {
  kSingle,  // one rank has all rows
  kDdp,     // each has the whole model
  kZero1,   // and a part of the optimizer state
  kZero2,   // and a part of the gradients
  kFsdp,    // each has a part of everything
  kHsdp,    // fsdp in several groups, whose parts are the same
};
inline constexpr std::array kDataStrategies{DataStrategy::kSingle, DataStrategy::kDdp,
                                            DataStrategy::kZero1,  DataStrategy::kZero2,
                                            DataStrategy::kFsdp,   DataStrategy::kHsdp};

// "single", "ddp", "zero1", "zero2", "fsdp", "hsdp".
CADRE_EXPORT std::string_view to_string(DataStrategy strategy);
// The reverse; nullopt for another text.
CADRE_EXPORT std::optional<DataStrategy> parse_data_strategy(std::string_view text);

// Whether a rank has parts of the parameters, which are gathered by units: fsdp and hsdp.
CADRE_EXPORT bool has_units(DataStrategy strategy);

// How the ranks that share parameters come to the shards of the others. Equal on all ranks.
enum class ShardForm : uint8_t {
  // Each rank copies them into a buffer of its own.
  kGathered,
  // Where all ranks share memory each reads them where their owners keep them: the buffer is one
  // mapping of all shards, nothing is copied, and a host holds the parameters once. Shards are
  // whole pages. They are written in updates only, see shard_fence.h; else a write throws. Across
  // hosts they are gathered, too.
  kMapped,
};

}  // namespace cadre
