// Errors that all ranks of a run throw with the same text, so that one rank can report it for all.
//
// Threads: one on each rank. Blocking: all functions but is_group_failure() are collective, until
// the group's deadline. Lifetime: plain values. Errors: CommonError, and those of the group.
#pragma once

#include <functional>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/group/process_group.h"

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

// Runs `prepare` on every rank. If it throws anything on some ranks, every rank throws the error of
// the lowest of these, which names that rank unless all throw. REQUIRES: `prepare` contains no
// collective.
void on_all_ranks(const ProcessGroup& world, const std::function<void()>& prepare);
// The same of work that only rank 0 does.
void on_first_rank(const ProcessGroup& world, const std::function<void()>& work);

// Throws unless all ranks have the same fields: the first different one, both values and both
// ranks. What `make_fields` throws is handled as by on_all_ranks().
void check_common(const ProcessGroup& world,
                  const std::function<std::vector<AgreedField>()>& make_fields);

}  // namespace cadre::train
