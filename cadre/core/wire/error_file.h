// The file in which a worker stores its failure for the launcher (TORCHELASTIC_ERROR_FILE), in
// torchelastic's JSON format.
//
// Threads: pure functions. Blocking: never. Errors: a text in another format gives nullopt.
// Source: torch.distributed.elastic.multiprocessing.errors (ErrorHandler, ProcessFailure).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "cadre/core/base/export.h"

namespace cadre {

struct ErrorFile {
  std::string message;  // for example "ValueError: odd"
  std::string call_stack;
  int64_t timestamp_s = 0;  // seconds since 1970; 0 in a file without a timestamp
  // Fields that torchelastic does not have. They are stored in the object "cadre" of "extraInfo".
  std::map<std::string, std::variant<int64_t, std::string>> details = {};

  friend bool operator==(const ErrorFile&, const ErrorFile&) = default;
};

// The field of `details` with the time of the failure in milliseconds since 1970.
inline constexpr const char* kTimeDetail = "time_ms";

// Returns {"message": {"message": ..., "extraInfo": {"py_callstack": ..., "timestamp": ...}}}.
// Bytes that are not UTF-8 are replaced.
std::string encode_error_file(const ErrorFile& file);

// Accepts also the forms {"message": "text"} and {"message": {"message": "text"}}.
std::optional<ErrorFile> parse_error_file(std::string_view text);

}  // namespace cadre
