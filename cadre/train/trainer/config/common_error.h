// Errors that all ranks of a run throw with the same text, so that one rank can report it for all.
//
// Threads: one on each rank. Blocking: all functions except is_group_failure() are collective; they
// wait until the group's deadline. Lifetime: plain values. Errors: CommonError, and those of the
// group.
#pragma once

#include <functional>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre::train {

// All ranks throw it in the same call, with the same text.
class CommonError : public Error {
 public:
  explicit CommonError(const Error& error) : Error(error) {}
};

// Returns whether the error is a failure of the group, which each rank reports in its own words.
bool is_group_failure(const Error& error);

// Calls `run`, a collective whose errors are equal on all ranks unless the group has failed. Throws
// such an error as CommonError.
void with_common_errors(const std::function<void()>& run);

// Runs `prepare` on every rank. If it throws on some ranks, every rank throws the error of the
// lowest of these; the message names that rank unless all ranks threw. REQUIRES: `prepare` contains
// no collective.
void on_all_ranks(const ProcessGroup& world, const std::function<void()>& prepare);
// Does the same for work that only rank 0 does.
void on_first_rank(const ProcessGroup& world, const std::function<void()>& work);

// Throws unless all ranks have the same fields; the message has the first field that differs, both
// values and both ranks. An exception of `make_fields` is handled as on_all_ranks() does.
void check_common(const ProcessGroup& world,
                  const std::function<std::vector<AgreedField>()>& make_fields);

}  // namespace cadre::train
