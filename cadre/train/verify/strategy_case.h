// One case of a verification: a strategy with its settings.
//
// Threads: plain values. Errors: kInvalidArgument with the list of valid names.
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
  DataStrategy strategy = DataStrategy::kDdp;  // never kSingle
  Reshard reshard = Reshard::kAfterForward;    // used by kFsdp and kHsdp
  ShardForm form = ShardForm::kGathered;       // used by kFsdp and kHsdp
  int reshard_group_size = 0;                  // used by Reshard::kOntoGroup
  int num_replicas = 1;                        // the size of the mesh's first axis; used by kHsdp
  // Each rank divides its share of a batch into this many parts and accumulates their gradients
  // under no_sync().
  int64_t num_parts = 1;
  // The sizes of the mesh axes that divide the model: its layers, its experts, the tokens, and its
  // matrices. The strategy applies to the remaining axis. Only programs that can divide their
  // model, such as the trainer, set these.
  int pipeline = 1;
  int expert = 1;
  int context = 1;
  int tensor = 1;
  bool is_sequence_parallel = false;

  friend bool operator==(const StrategyCase&, const StrategyCase&) = default;
};

// Returns the name of the case: "zero2", "fsdp/after_forward",
// "hsdp-2x4/after_forward/mapped/accumulate" or "ddp/pp-2/tp-2". The numbers of hsdp are replicas x
// shards. world_size is the number of all ranks; those of them that divide the model are not
// counted in replicas x shards.
CADRE_EXPORT std::string name_of(const StrategyCase& strategy, int world_size);

struct StrategySpace {
  int world_size = 1;
  // Each strategy has a case with one part and a case with this many parts.
  int64_t num_parts = 2;
  // Whether Reshard::kOntoGroup is included; the trainer's configuration has no key for it.
  bool has_group_reshard = true;
};
// Returns every case for this number of ranks. hsdp has a case for each pair of factors above 1,
// and kOntoGroup is included if the ranks that own shards can be divided into groups. Mapped shards
// are combined with kAfterForward only.
CADRE_EXPORT std::vector<StrategyCase> all_strategy_cases(const StrategySpace& space);

// Returns the cases that the words select; all cases if there are no words. A word is a whole name,
// or the beginning of a name up to a "/" or, for "hsdp", up to a "-". Throws for a word that
// selects no case; the message lists the names.
CADRE_EXPORT std::vector<StrategyCase> select_strategy_cases(std::span<const StrategyCase> cases,
                                                             std::span<const std::string> words,
                                                             int world_size);

}  // namespace cadre
