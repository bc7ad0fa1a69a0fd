// How often connecting a group has failed, counted in the store: part of the keys of the next
// attempt, which so finds nothing of the failed one.
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
  // `group_prefix` is that of the group and round in the store.
  AttemptCounter(Store& store, const std::string& group_prefix);

  // The number of the attempt that a rank joins now, from 0.
  Result<uint64_t> read(Deadline deadline) const;
  // Attempt `failed` is over: of several ranks that say so one counts. Best effort.
  void leave(uint64_t failed, Deadline deadline) const;

 private:
  Store& store_;
  const std::string key_;
};

}  // namespace cadre
