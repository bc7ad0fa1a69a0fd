// Agreement among the ranks of a group before an operation that must begin on all of them or on
// none: an error of one rank is thrown on all ranks, and values that must be equal are compared.
// Every constructor and every call that could throw on one rank only runs such an agreement before
// its first collective and before it changes any state. Otherwise the other ranks would wait in the
// collective for the rank that has thrown.
//
// An agreement costs one all_gather of 128 bytes for each rank if no rank throws and no value
// differs. A group of one rank exchanges nothing.
//
// Threads: as ProcessGroup. Blocking: collective; returns when the slowest rank has called it, or
// fails after the call's timeout. Errors: the same on all ranks, with the rank at fault as culprit;
// those of the group; kInvalidArgument on all ranks if some of them are in the agreement of another
// call.
#pragma once

#include <cstddef>
#include <cstdint>
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

// The call of the program that needs the agreement.
struct AgreementSubject {
  AgreementSubject(const char* call_name)  // NOLINT(google-explicit-constructor): a name suffices
      : call(call_name) {}
  AgreementSubject(std::string_view call_name, Duration longest)
      : call(call_name), timeout(longest) {}

  std::string_view call;                 // static text, such as "DataLoader" or "cadre::Pipeline"
  std::optional<Duration> timeout = {};  // if nullopt, the group's timeout is used
};

struct CommonRefusal {
  Error error;  // the error code and message of `rank`
  int rank;     // the lowest rank whose check has thrown
  int num_refusing;
};

// Runs `check` on every rank. If it throws on one or more ranks, returns the error of the lowest of
// them, on all ranks. Returns nullopt if it throws on none. The exception may be of any type. In a
// group of one rank an exception of `check` becomes the result, too. REQUIRES: `check` contains no
// collective of the group.
CADRE_EXPORT std::optional<CommonRefusal> common_refusal(const ProcessGroup& group,
                                                         const AgreementSubject& subject,
                                                         const std::function<void()>& check);

// Runs `check` and exchanges its error over several groups, such as those along the axes of a mesh,
// one after the other. If a rank of any group throws, all ranks of all groups return its error. If
// there are no groups, returns the error of this rank. All ranks pass the groups in the same order.
CADRE_EXPORT std::optional<Error> common_refusal(std::span<const ProcessGroup> groups,
                                                 const AgreementSubject& subject,
                                                 const std::function<void()>& check);

// Runs `check` on every rank. If it throws on one or more ranks, throws the error of the lowest of
// them, on all ranks. If it threw on some ranks only, the message also names that lowest rank,
// because the ranks may run different programs.
CADRE_EXPORT void check_on_all_ranks(const ProcessGroup& group, const AgreementSubject& subject,
                                     const std::function<void()>& check);

// Returns the text or the error of each rank, indexed by rank. The result is the same on all ranks.
CADRE_EXPORT std::vector<Result<std::string>> gather_outcomes(
    const ProcessGroup& group, const AgreementSubject& subject,
    const std::function<std::string()>& make_text);

// Returns the integers ("words") of each rank, indexed by rank. Throws the error of a rank as
// check_on_all_ranks() does. Costs one all_gather if no rank has an error, so it is cheap enough
// for every training step. It does not detect that some ranks are in another call. make_words:
// returns `num_words` integers, as many on all ranks, and calls no collective. timeout: the limit
// of the all_gather; default: the group's.
CADRE_EXPORT std::vector<std::vector<int64_t>> gather_words(
    const ProcessGroup& group, const AgreementSubject& subject, size_t num_words,
    const std::function<std::vector<int64_t>()>& make_words, std::optional<Duration> timeout = {});

// Returns the text of each rank, indexed by rank. Throws the error of a rank as
// check_on_all_ranks() does.
CADRE_EXPORT std::vector<std::string> gather_texts(const ProcessGroup& group,
                                                   const AgreementSubject& subject,
                                                   const std::function<std::string()>& make_text);

// A value that must be equal on all ranks, given as a name for error messages and as a text.
struct AgreedField {
  std::string name;
  std::string value;

  bool operator==(const AgreedField&) const = default;
};

// Throws kInvalidArgument on all ranks unless all ranks have the same fields in the same order. The
// message is a sentence such as 'Pipeline on group "world": num_microbatches is 4 on rank 0 and 8
// on rank 2', followed by "; " and `remedy`.
CADRE_EXPORT void check_equal_on_all_ranks(
    const ProcessGroup& group, const AgreementSubject& subject,
    const std::function<std::vector<AgreedField>()>& make_fields, std::string_view remedy);

}  // namespace cadre
