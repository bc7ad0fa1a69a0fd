// What some ranks of a group refuse before a collective, thrown on all ranks: the ranks that would
// go on learn of it, instead of waiting in the collective until its deadline.
//
// Threads: one on each rank. Blocking: collective, until the group's deadline. Lifetime: plain
// values. Errors: those of the group; check_on_all_ranks() also throws those of `check`.
#pragma once

#include <functional>
#include <optional>

#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/base/types.h"
#include "cadre/group/process_group.h"

namespace cadre::layers {

struct CommonRefusal {
  Error error;  // of the lowest rank that has one: its code and message
  Rank rank;    // that rank
  int num_refusing;
};

// Runs `check` on every rank. If it throws an Error on some, the result is the same on all ranks.
// REQUIRES: `check` contains no collective.
CADRE_EXPORT std::optional<CommonRefusal> common_refusal(const ProcessGroup& group,
                                                         const std::function<void()>& check);

// Throws it, and names its rank if other ranks refuse nothing: then their program differs.
CADRE_EXPORT void check_on_all_ranks(const ProcessGroup& group, const std::function<void()>& check);

}  // namespace cadre::layers
