// One way to train a model on ranks that a verification tries: a strategy with its settings.
//
// Threads: plain values. Blocking: never. Errors: kInvalidArgument with the names that exist.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/export.h"
#include "cadre/parallel/fsdp/options.h"
#include "cadre/shard/shard_form.h"

namespace cadre {

enum class VerifiedStrategy : uint8_t { kDdp, kZero1, kZero2, kFsdp, kHsdp };

struct StrategyCase {
  VerifiedStrategy strategy = VerifiedStrategy::kDdp;
  Reshard reshard = Reshard::kAfterForward;  // of kFsdp and kHsdp
  ShardForm form = ShardForm::kGathered;     // likewise
  int reshard_group_size = 0;                // of Reshard::kOntoGroup
  int num_replicas = 1;                      // of kHsdp: the size of the mesh's first axis
  // Each rank's share of a batch is cut into so many parts, whose gradients are accumulated under
  // no_sync().
  int64_t num_parts = 1;

  friend bool operator==(const StrategyCase&, const StrategyCase&) = default;
};

// "ddp", "zero1", "zero2", "fsdp", "hsdp".
CADRE_EXPORT std::string_view name_of(VerifiedStrategy strategy);
// "after_forward", "after_backward", "after_reduction", "onto_group".
CADRE_EXPORT std::string_view name_of(Reshard reshard);
// "zero2", "fsdp/after_forward", "hsdp-2x4/after_forward/mapped/accumulate": the shape of hsdp's
// mesh is (replicas, shards) for `world_size` ranks.
CADRE_EXPORT std::string name_of(const StrategyCase& strategy, int world_size);

struct StrategySpace {
  int world_size = 1;
  // Each case with one part, and with so many.
  int64_t num_parts = 2;
  // Without: no Reshard::kOntoGroup, which the trainer has no key for.
  bool has_group_reshard = true;
};
// Every case for so many ranks: hsdp for each two factors above 1; kOntoGroup where the ranks that
// own shards can be divided; mapped shards with kAfterForward.
CADRE_EXPORT std::vector<StrategyCase> all_strategy_cases(const StrategySpace& space);

// The cases that a word selects: a whole name, or the beginning of one up to a "/" or, for "hsdp",
// up to "-". Without words all of them. Every word selects a case, or the error lists the names.
CADRE_EXPORT std::vector<StrategyCase> select_strategy_cases(std::span<const StrategyCase> cases,
                                                             std::span<const std::string> words,
                                                             int world_size);

}  // namespace cadre
