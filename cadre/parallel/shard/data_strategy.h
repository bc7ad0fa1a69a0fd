// Defines the strategies of data parallelism: how ranks that train on different rows of a batch
// divide the model. Memory plans, verifications and the trainer use them. Also defines how ranks
// read each other's shards.
//
// Threads: any.
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
  kZero1,   // each rank has the whole model, but only a part of the optimizer state
  kZero2,   // like kZero1, and each rank keeps only a shard of the gradients
  kFsdp,    // each rank has a part of parameters, gradients and optimizer state
  kHsdp,    // like kFsdp within each group of ranks; the groups hold the same shards
};
inline constexpr std::array kDataStrategies{DataStrategy::kSingle, DataStrategy::kDdp,
                                            DataStrategy::kZero1,  DataStrategy::kZero2,
                                            DataStrategy::kFsdp,   DataStrategy::kHsdp};

// Returns "single", "ddp", "zero1", "zero2", "fsdp" or "hsdp".
CADRE_EXPORT std::string_view to_string(DataStrategy strategy);
// Does the reverse of to_string(); returns nullopt for another text.
CADRE_EXPORT std::optional<DataStrategy> parse_data_strategy(std::string_view text);

// Returns whether each rank has only a part of the parameters, so that the parameters of one module
// after the other are gathered: true for fsdp and hsdp.
CADRE_EXPORT bool has_units(DataStrategy strategy);

// The way in which ranks read each other's shards. It is equal on all ranks.
enum class ShardForm : uint8_t {
  // Each rank gathers the shards of all ranks into a buffer of its own.
  kGathered,
  // If all ranks share memory (they are on one host and do not communicate over TCP), each rank
  // maps the memory of all shards contiguously and reads them in place: no shard is copied, and the
  // host holds the parameters once. Each shard is a number of whole pages. Shards are written only
  // in a ShardUpdate; any other write throws. Ranks that do not share memory gather shards as with
  // kGathered.
  kMapped,
};

}  // namespace cadre
