// Counts in the store how often connecting a group has failed. The count is part of the keys of the
// next attempt, so that it finds no keys of the failed one.
//
// Threads: one. Blocking: for an answer of the store, until the deadline. Lifetime: borrows the
// store. Errors: those of the store; kCorruption for a value that is no number.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/store/store.h"

namespace cadre {

class AttemptCounter {
 public:
  // `group_prefix` is the store prefix of the group and round.
  AttemptCounter(Store& store, const std::string& group_prefix);

  // Returns the number of the attempt that a rank joins now, from 0.
  Result<uint64_t> read(Deadline deadline) const;
  // Ends attempt `failed`. If several ranks end it, only one call counts. Best effort.
  void leave(uint64_t failed, Deadline deadline) const;

 private:
  Store& store_;
  const std::string key_;
};

}  // namespace cadre
