// Points at which the ranks of a group learn what each of them has to say, and whether one failed.
//
// Threads: one. Blocking: gather() and follow(), until the slowest rank has come or for `timeout`.
// Lifetime: keeps the group. Errors: as a value, also those of the group.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/base/deadline.h"
#include "cadre/base/error.h"
#include "cadre/group/process_group.h"

namespace cadre {

class RankAgreement {
 public:
  // Of one process on its own.
  RankAgreement() = default;
  RankAgreement(ProcessGroup group, Duration timeout)
      : group_(std::move(group)), timeout_(timeout) {}

  int rank() const { return group_ ? group_->rank() : 0; }
  int world_size() const { return group_ ? group_->world_size() : 1; }

  // Collective. What every rank gives, by rank; or, on all ranks, the error of the lowest rank that
  // gives one, with "rank 2: " before it.
  Result<std::vector<std::string>> gather(const Result<std::string>& own) const;
  // Collective. Rank 0's outcome, on all ranks.
  Status follow_first(const Status& own) const;

 private:
  Result<std::vector<Result<std::string>>> gather_outcomes(const Result<std::string>& own) const;
  // Throws the errors of the group.
  std::vector<std::vector<std::byte>> gather_bytes(const std::vector<std::byte>& own) const;

  std::optional<ProcessGroup> group_;
  Duration timeout_{};
};

}  // namespace cadre
