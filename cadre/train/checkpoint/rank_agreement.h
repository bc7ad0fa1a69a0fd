// Exchanges texts or errors among the ranks that save or load a snapshot together. Without a group,
// this process counts as the only rank.
//
// Threads: one. Blocking: gather() and follow_first() return when the slowest rank has called them,
// at the latest after `timeout`. Lifetime: keeps the group. Errors: returned as values, including
// those of the group.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

struct SaveOptions;
class SnapshotFolder;
struct SnapshotParts;

class RankAgreement {
 public:
  // Makes an object for a single process without a group.
  RankAgreement() = default;
  RankAgreement(ProcessGroup group, Duration timeout)
      : group_(std::move(group)), timeout_(timeout) {}

  int rank() const { return group_ ? group_->rank() : 0; }
  int world_size() const { return group_ ? group_->world_size() : 1; }

  // Collective. Each rank passes a text or an error. If all ranks pass texts, returns the texts
  // indexed by rank. Otherwise returns on all ranks the error of the lowest rank that passes one,
  // prefixed with that rank, for example "rank 2: ".
  Result<std::vector<std::string>> gather(const Result<std::string>& own) const;
  // Collective. Returns the status that rank 0 passes, on all ranks.
  Status follow_first(const Status& own) const;

 private:
  Result<std::vector<Result<std::string>>> outcomes_of(const Result<std::string>& own) const;

  std::optional<ProcessGroup> group_;
  Duration timeout_{};
};

// The implementation of save_sharded() for ranks that already have a RankAgreement. If `parts` is
// an error on one rank, all ranks throw it.
void save_sharded(SnapshotFolder& folder, int64_t step, const Result<SnapshotParts>& parts,
                  const RankAgreement& ranks, const SaveOptions& options);

}  // namespace cadre
