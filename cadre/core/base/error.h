// Errors as values and as exceptions, with codes that name the remedy.
//
// Threads: plain values; safe to copy and move between threads.
// Blocking: never.
// Lifetime: an Error owns its texts.
// Source: error kinds named by what the reader should do, after Cap'n Proto's KJ.
//
// Inside event loops and across threads errors travel as Result<T>; the public blocking calls
// turn them into exceptions with Result<T>::value_or_throw().
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

// Each code says what the reader should do about the error. No code is 0, so a program whose main()
// returns a code does not report success.
enum class ErrorCode {
  kInvalidArgument = 1,  // fix the program
  kTimeout,              // restart the job or rejoin(), or give more time; the late peer is named
  kPeerLost,             // restart the job, or rejoin() without the named peer
  kAborted,              // look at the first failure, which the message points to
  kUnavailable,          // retry
  kCorruption,           // use an older checkpoint, or check the peer's version
  kInternal,             // report it: a defect of this library
};

// Returns the code's name as it appears in messages, for example "kPeerLost".
CADRE_EXPORT std::string_view to_string(ErrorCode code);

// What a program may want to know about a failed operation without parsing its message. Ranks are
// those of the group that failed; a field that is unknown or does not apply is empty.
struct ErrorDetails {
  std::optional<Rank> culprit = {};  // the rank at fault
  // The culprit's rank in the world, from which all other groups are split. It is set also if the
  // culprit is no member of the group that failed.
  std::optional<Rank> culprit_world_rank = {};
  std::optional<Rank> reporter = {};  // the rank that found the first failure
  // The call of the program that failed on this rank: "all_reduce", "split".
  std::string operation = {};
  // The number of the operation in its group; the first operation has number 1.
  std::optional<uint64_t> operation_number = {};
  std::string group = {};  // name of the group
  // True if no peer is at fault: a limit of this process or machine is exhausted, for example
  // RLIMIT_NOFILE, or the program has closed a descriptor of the library.
  bool is_own_limit = false;
  // True if a connection failed because its host answered that no process listens at the address.
  bool is_refused = false;
};

// An error: a code for programs and a sentence for people. The sentence says what happened, where
// (rank, group, operation number, peer), what was expected and what to do. Equality compares both.
class CADRE_EXPORT Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message);

  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  const ErrorDetails& details() const { return details_; }
  const char* what() const noexcept override { return message_.c_str(); }

  // Returns the same error with `context` and ": " before its message.
  Error with_context(std::string_view context) const;
  // Returns the same error with all its details replaced by these.
  Error with_details(ErrorDetails details) const;
  // Each returns the same error with this culprit or reporter; a culprit or reporter that the error
  // already has is kept.
  Error with_culprit(Rank culprit) const;
  Error with_reporter(Rank reporter) const;

  friend bool operator==(const Error& a, const Error& b) {
    return a.code_ == b.code_ && a.message_ == b.message_;
  }

 private:
  ErrorCode code_;
  std::string message_;
  ErrorDetails details_;
};

// Holds either a T or an Error. Ignoring a returned Result is a compile-time warning.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  // REQUIRES: ok().
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

  // REQUIRES: !ok().
  const Error& error() const { return std::get<1>(state_); }

  // Returns the value, or throws the error. Only public blocking calls use it.
  T value_or_throw() && {
    if (!ok()) throw error();
    return std::move(*this).value();
  }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  // The constructor is not defaulted, because `return {}` would then zero the whole object for each
  // operation that succeeds.
  Result() {}                                        // NOLINT(modernize-use-equals-default)
  Result(Error error) : error_(std::move(error)) {}  // NOLINT: implicit

  bool ok() const { return !error_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Error& error() const { return *error_; }
  void value_or_throw() const {
    if (error_) throw *error_;
  }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

}  // namespace cadre

// Evaluates a Status or Result, and returns its error from the enclosing function if it has one.
#define CADRE_RETURN_IF_ERROR(expression)                                                     \
  do {                                                                                        \
    if (auto cadre_status_ = (expression); !cadre_status_.ok()) return cadre_status_.error(); \
  } while (false)
