// Agreement among the ranks of a group before an operation that must begin on all of them or on
// none: a refusal of one rank is thrown on all ranks, and values that must be equal are compared.
// Every constructor and every call that can refuse on one rank alone goes through it before its
// first collective, and before it changes anything.
//
// Each call costs one all_gather of 128 bytes for each rank while nothing is refused and nothing
// differs. A group of one rank exchanges nothing.
//
// Threads: as ProcessGroup. Blocking: collective, until the slowest rank has called it, at most for
// the call's timeout. Errors: the same on all ranks, with the rank at fault as culprit; those of
// the group; kInvalidArgument on all ranks when some of them are in the agreement of another call.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

// The call of the program for which the ranks agree.
struct AgreementSubject {
  AgreementSubject(const char* call_name)  // NOLINT(google-explicit-constructor): a name suffices
      : call(call_name) {}
  AgreementSubject(std::string_view call_name, Duration longest)
      : call(call_name), timeout(longest) {}

  std::string_view call;                 // "DataLoader", "cadre::Pipeline"; static text
  std::optional<Duration> timeout = {};  // default: the group's
};

struct CommonRefusal {
  Error error;  // code and message of the lowest refusing rank
  int rank;     // that rank
  int num_refusing;
};

// Runs `check` on every rank. What it throws, of any type, is the rank's refusal, and the lowest
// rank's is the result on all ranks; nullopt if no rank refuses. In a group of one rank `check` is
// run and its exception becomes the result, too.
// REQUIRES: `check` contains no collective of the group.
CADRE_EXPORT std::optional<CommonRefusal> common_refusal(const ProcessGroup& group,
                                                         const AgreementSubject& subject,
                                                         const std::function<void()>& check);

// The same over several groups, such as those along the axes of a mesh, one after the other: what
// any rank of any of them refuses is the result on all. Without groups, what this rank refuses.
// groups: in the same order on all ranks.
CADRE_EXPORT std::optional<Error> common_refusal(std::span<const ProcessGroup> groups,
                                                 const AgreementSubject& subject,
                                                 const std::function<void()>& check);

// Throws the refusal of one group, and names its rank if other ranks refuse nothing: then their
// program differs.
CADRE_EXPORT void check_on_all_ranks(const ProcessGroup& group, const AgreementSubject& subject,
                                     const std::function<void()>& check);

// The text or the refusal of each rank, by rank; the same on all ranks.
CADRE_EXPORT std::vector<Result<std::string>> gather_outcomes(
    const ProcessGroup& group, const AgreementSubject& subject,
    const std::function<std::string()>& make_text);

// The text of each rank, by rank. A refusal is thrown as by check_on_all_ranks().
CADRE_EXPORT std::vector<std::string> gather_texts(const ProcessGroup& group,
                                                   const AgreementSubject& subject,
                                                   const std::function<std::string()>& make_text);

// What must be equal on all ranks: a name for messages, and a text that determines the value.
struct AgreedField {
  std::string name;
  std::string value;

  bool operator==(const AgreedField&) const = default;
};

// Throws kInvalidArgument on all ranks unless all ranks have the same fields in the same order:
// 'Pipeline on group "world": num_microbatches is 4 on rank 0 and 8 on rank 2; ' and `remedy`.
CADRE_EXPORT void check_equal_on_all_ranks(
    const ProcessGroup& group, const AgreementSubject& subject,
    const std::function<std::vector<AgreedField>()>& make_fields, std::string_view remedy);

}  // namespace cadre
