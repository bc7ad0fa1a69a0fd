// One case of a verification, which is a strategy with its settings.
//
// Threads: plain values. Blocking: never. Errors: kInvalidArgument with the names that exist.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/parallel/shard/data_strategy.h"

namespace cadre {

struct StrategyCase {
  DataStrategy strategy = DataStrategy::kDdp;  // is not kSingle
  Reshard reshard = Reshard::kAfterForward;    // is used by kFsdp and kHsdp
  ShardForm form = ShardForm::kGathered;       // is used by kFsdp and kHsdp
  int reshard_group_size = 0;                  // is used by Reshard::kOntoGroup
  int num_replicas = 1;  // is used by kHsdp: the size of the mesh's first axis
  // The number of parts of each rank's share of a batch. Their gradients are accumulated under
  // no_sync().
  int64_t num_parts = 1;
  // The numbers of ranks that divide the layers, the experts, the tokens and the matrices of the
  // model. The strategy applies to the other ranks. Only programs that can divide their model, such
  // as the trainer, set them.
  int pipeline = 1;
  int expert = 1;
  int context = 1;
  int tensor = 1;
  bool is_sequence_parallel = false;

  friend bool operator==(const StrategyCase&, const StrategyCase&) = default;
};

// Returns the name of the case: "zero2", "fsdp/after_forward",
// "hsdp-2x4/after_forward/mapped/accumulate" or "ddp/pp-2/tp-2". The mesh of hsdp has the shape
// (replicas, shards) of those of `world_size` ranks that have equal parts of the model.
CADRE_EXPORT std::string name_of(const StrategyCase& strategy, int world_size);

struct StrategySpace {
  int world_size = 1;
  // Each case is run with one part and with this number of parts.
  int64_t num_parts = 2;
  // Includes Reshard::kOntoGroup, for which the trainer has no key.
  bool has_group_reshard = true;
};
// Returns every case for this number of ranks: hsdp for each pair of factors above 1; kOntoGroup if
// the ranks that own shards can be divided; mapped shards with kAfterForward.
CADRE_EXPORT std::vector<StrategyCase> all_strategy_cases(const StrategySpace& space);

// Returns the cases that the words select; all cases if there are no words. A word is a whole name,
// or the beginning of a name up to a "/" or, for "hsdp", up to "-". A word that selects no case is
// an error, which lists the names.
CADRE_EXPORT std::vector<StrategyCase> select_strategy_cases(std::span<const StrategyCase> cases,
                                                             std::span<const std::string> words,
                                                             int world_size);

}  // namespace cadre
