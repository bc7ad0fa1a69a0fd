// Defines the strategies by which ranks that have different rows of a batch divide the model, for
// memory plans, verifications and the trainer, with their names. Also defines the form of shards.
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
  kDdp,     // each rank has the whole model
  kZero1,   // each rank also has only a part of the optimizer state
  kZero2,   // each rank also has only a part of the gradients
  kFsdp,    // each rank has a part of everything
  kHsdp,    // as fsdp, in several groups that hold the same shards
};
inline constexpr std::array kDataStrategies{DataStrategy::kSingle, DataStrategy::kDdp,
                                            DataStrategy::kZero1,  DataStrategy::kZero2,
                                            DataStrategy::kFsdp,   DataStrategy::kHsdp};

// Returns "single", "ddp", "zero1", "zero2", "fsdp" or "hsdp".
CADRE_EXPORT std::string_view to_string(DataStrategy strategy);
// Does the reverse of to_string(); returns nullopt for another text.
CADRE_EXPORT std::optional<DataStrategy> parse_data_strategy(std::string_view text);

// Returns whether each rank has parts of the parameters, which are gathered by units: fsdp and
// hsdp.
CADRE_EXPORT bool has_units(DataStrategy strategy);

// The way in which ranks read each other's shards. It is equal on all ranks.
enum class ShardForm : uint8_t {
  // Each rank copies the shards into a buffer of its own.
  kGathered,
  // If all ranks share memory, each reads the shards where their owners keep them: the buffer is
  // one mapping of all shards, nothing is copied, and a host holds the parameters once. Shards are
  // whole pages. They are written only in a ShardUpdate; any other write throws. Across hosts
  // shards are gathered, as with kGathered.
  kMapped,
};

}  // namespace cadre
