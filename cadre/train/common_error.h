// Errors that all ranks of a run throw with the same text, so that one rank can report it for all.
//
// Threads: one on each rank. Blocking: both functions are collective, until the group's deadline.
// Lifetime: plain values. Errors: CommonError, and those of the group.
#pragma once

#include <functional>

#include "cadre/base/error.h"
#include "cadre/group/process_group.h"

namespace cadre::train {

// Every rank throws it in the same call, with the same text.
class CommonError : public Error {
 public:
  explicit CommonError(const Error& error) : Error(error) {}
};

// Whether the error is a failure of the group, which each rank reports in its own words.
bool is_group_failure(const Error& error);

// Calls `run`, a collective whose errors are equal on all ranks unless the group has failed, and
// throws such an error as CommonError.
void with_common_errors(const std::function<void()>& run);

// Runs `prepare` on every rank. If it throws an Error on some ranks, every rank throws the error of
// the lowest of these. REQUIRES: `prepare` contains no collective.
void on_all_ranks(const ProcessGroup& world, const std::function<void()>& prepare);

}  // namespace cadre::train
