#include "cadre/launch/job/error_file.h"

#include <nlohmann/json.hpp>
#include <span>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/wire/error_file.h"
#include "cadre/launch/job/exit_meaning.h"
#include "cadre/launch/job/failure_report.h"

namespace cadre::launch {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 16;  // limits the nesting of a worker's JSON file

// Returns whether torchelastic can read the error file: "message" must be a string, or an object
// with a timestamp.
bool is_complete(const Json& root) {
  if (!root.is_object() || !root.contains("message")) return false;
  const Json& message = root["message"];
  if (message.is_string()) return true;
  if (!message.is_object() || !message.contains("extraInfo")) return false;
  const Json& extra = message["extraInfo"];
  return extra.is_object() && extra.contains("timestamp");
}

std::string ending_of(const JobFailure& failure) {
  const WorkerExit& first = failure.first;
  return cadre::format("rank {} of {} failed with {} on {}, pid {}", first.rank,
                       failure.num_workers, exit_name(first.status), failure.host, first.pid);
}

Json describe(const JobFailure& failure) {
  std::string traceback = ending_of(failure) + "\n";
  for (const std::string& line : failure.last_lines) traceback += line + "\n";
  return Json::parse(encode_error_file({.message = sentence_of(failure),
                                        .call_stack = traceback,
                                        .timestamp_s = failure.timestamp_s}));
}

}  // namespace

std::string sentence_of(const JobFailure& failure) {
  const std::string exception = exception_in(failure.worker_file);
  const std::string ending = ending_of(failure);
  return exception.empty() ? ending : cadre::format("{}: {}", ending, exception);
}

Status write_error_file(const std::string& path, const JobFailure& failure) {
  Json root;
  if (const auto content = os::read_file(failure.worker_file, kMaxErrorFileBytes); content.ok()) {
    // Values that are nested deeper are dropped, because dump() recurses for each level and could
    // exhaust the stack.
    const auto is_kept = [](int depth, Json::parse_event_t, Json&) { return depth <= kMaxDepth; };
    root = Json::parse(*content, is_kept, /*allow_exceptions=*/false);
  }
  if (!is_complete(root)) root = describe(failure);
  if (root["message"].is_object()) {
    // The error code of a signal is its negative number, as in Python's subprocess.
    const os::ExitStatus& status = failure.first.status;
    root["message"]["errorCode"] = status.signal != 0 ? -status.signal : status.shell_code();
  }
  // Bytes that are not UTF-8 are replaced, because workers' lines may contain any bytes.
  const std::string text = root.dump(-1, ' ', false, Json::error_handler_t::replace);
  return os::replace_file(path, std::as_bytes(std::span(text)));
}

}  // namespace cadre::launch
