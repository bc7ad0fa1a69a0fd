#include "cadre/launch/job/failure/crash_report.h"

#include <algorithm>
#include <array>
#include <span>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/host/wall_clock.h"
#include "cadre/core/os/proc/process.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/core/wire/crash_file.h"
#include "cadre/core/wire/error_file.h"
#include "cadre/launch/job/error_file.h"

namespace cadre::launch {
namespace {

constexpr size_t kMaxStackBytes = 256 << 10;

// Returns the output of the command; empty if it does not succeed in time.
std::string output_of(os::System& system, const os::ProcessOptions& options) {
  const auto process = os::Process::start(options);
  if (!process.ok()) return "";
  const Deadline deadline = system.deadline_in(kStackTimeout);
  std::string output;
  std::vector<std::byte> buffer(64 << 10);
  bool has_ended = false;
  while (!has_ended && output.size() < kMaxStackBytes) {
    if (deadline.has_passed(system.now())) return "";
    std::array items{os::PollItem{.target = &(*process)->standard_output(), .want_read = true}};
    system.poll(items, deadline);
    const auto chunk = (*process)->standard_output().try_read(buffer);
    output.append(reinterpret_cast<const char*>(buffer.data()), chunk.num_bytes);
    has_ended = chunk.has_ended;
  }
  return output;
}

// Returns the lines of the stack in the output of `cadre stack`.
std::vector<std::string> stack_lines(std::string_view output) {
  std::vector<std::string> lines;
  while (!output.empty()) {
    const size_t end = std::min(output.find('\n'), output.size());
    if (output.starts_with('#')) lines.emplace_back(output.substr(0, end));
    output.remove_prefix(std::min(end + 1, output.size()));
  }
  return lines;
}

// Returns the files and offsets of the stack, for `addr2line`.
std::vector<std::string> unresolved_lines(const CrashFile& crash) {
  std::vector<std::string> lines;
  for (const CrashFrame& frame : crash.frames) {
    const uint64_t address = frame.is_exact ? frame.address : frame.address - 1;
    const auto code = find_mapped_code(crash.maps, address);
    lines.push_back(code ? cadre::format("#{} {:#x} in {}", lines.size(), code->offset, code->path)
                         : cadre::format("#{} {:#x}", lines.size(), frame.address));
  }
  return lines;
}

// Returns whether the frame belongs to the C or C++ library, or is the handler of std::terminate()
// in core/os/proc/record/crash_handler.cpp.
bool is_in_runtime(const std::string& line) {
  const size_t in = line.rfind(" in ");
  return line.find("cadre::os::(anonymous namespace)::on_terminate()") != std::string::npos ||
         (in != std::string::npos && is_runtime_library(std::string_view(line).substr(in)));
}

}  // namespace

bool is_runtime_library(std::string_view path) {
  constexpr std::array kRuntime{"/libc.so", "/libstdc++.so", "/libgcc_s.so", "/ld-linux", "[vdso]"};
  return std::ranges::any_of(
      kRuntime, [&](std::string_view name) { return path.find(name) != std::string_view::npos; });
}

std::string place_of(const std::vector<std::string>& stack) {
  if (stack.empty()) return "";
  const auto begin =
      std::ranges::find_if(stack, [](const auto& line) { return !is_in_runtime(line); });
  auto found = std::find_if(begin, stack.end(), [](const std::string& line) {
    return line.find(" at ") != std::string::npos;
  });
  if (found == stack.end()) found = begin;
  const std::string& line = found == stack.end() ? stack.front() : *found;
  return line.substr(line.find(' ') + 1);
}

std::optional<CrashReport> read_crash(os::System& system, const std::string& error_file,
                                      const std::string& cadre,
                                      const os::Environment& environment) {
  const std::string path = error_file + std::string(kCrashFileSuffix);
  const auto content = os::read_file(path, kMaxCrashFileBytes);
  if (!content.ok()) return std::nullopt;
  const auto crash = parse_crash_file(*content);
  if (!crash.ok()) return std::nullopt;
  CrashReport report;
  report.stack = stack_lines(output_of(system, {.executable = cadre,
                                                .arguments = {"cadre", "stack", path},
                                                .environment = environment.to_texts()}));
  if (report.stack.empty()) report.stack = unresolved_lines(*crash);
  report.summary = os::signal_name(crash->signal);
  if (crash->code > 0) report.summary += cadre::format(" at address {:#x}", crash->address);
  const std::string place = place_of(report.stack);
  if (!place.empty()) report.summary += " in " + place;
  return report;
}

Status add_crash(const std::string& error_file, const CrashReport& report) {
  ErrorFile file;
  if (const auto content = os::read_file(error_file, kMaxErrorFileBytes); content.ok()) {
    file = parse_error_file(*content).value_or(ErrorFile{});
  }
  if (file.message.empty()) file.message = report.summary;
  if (file.timestamp_s == 0) file.timestamp_s = os::wall_clock_seconds();
  if (file.call_stack.empty()) file.call_stack = file.message + "\n";
  for (const std::string& line : report.stack) file.call_stack += line + "\n";
  const std::string text = encode_error_file(file);
  return os::replace_file(error_file, std::as_bytes(std::span(text)));
}

}  // namespace cadre::launch
