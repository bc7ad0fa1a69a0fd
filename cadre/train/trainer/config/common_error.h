// Errors that all ranks of a run throw with the same text, so that only one rank needs to print
// them.
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

// An error that every rank throws in the same call, with the same text.
class CommonError : public Error {
 public:
  explicit CommonError(const Error& error) : Error(error) {}
};

// Returns whether the error is a failure of the group. Its text differs between ranks, so each rank
// prints its own.
bool is_group_failure(const Error& error);

// Calls `run`, which must be a collective that throws equal errors on all ranks unless the group
// fails. Throws such an equal error as CommonError, and a failure of the group unchanged.
void with_common_errors(const std::function<void()>& run);

// Runs `prepare` on every rank. If it throws on some ranks, every rank throws the error of the
// lowest of these; the message names that rank unless all ranks threw. REQUIRES: `prepare` contains
// no collective.
void on_all_ranks(const ProcessGroup& world, const std::function<void()>& prepare);
// Runs `work` on rank 0 only; errors are thrown on all ranks, as by on_all_ranks().
void on_first_rank(const ProcessGroup& world, const std::function<void()>& work);

// Throws on all ranks unless all have the same fields. The message has the first field that
// differs, both values and both ranks. An exception of `make_fields` is thrown on all ranks, as by
// on_all_ranks().
void check_common(const ProcessGroup& world,
                  const std::function<std::vector<AgreedField>()>& make_fields);

}  // namespace cadre::train
