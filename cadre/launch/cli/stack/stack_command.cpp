// `cadre stack`: prints the functions, files and lines of a crash file.
#include <array>
#include <cstdlib>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/os/proc/signals.h"
#include "cadre/launch/cli/command.h"
#include "cadre/launch/cli/option_words.h"
#include "cadre/launch/cli/stack/symbolizer.h"

namespace cadre::cli {
namespace {

constexpr std::string_view kStackCommand = "cadre stack";
constexpr std::string_view kStackHelp = R"(cadre stack FILE

Prints the stack of a process that crashed under cadre::record(): its functions, files and lines,
innermost call first. FILE is the process's error file with .crash appended, for example
/tmp/torchelastic_x/none_y/attempt_0/0/error.json.crash. `cadre run` does this for its own workers.
The program and its libraries must still be where they were, and unchanged; lines need debug
information (-g or -g1).

Options
  --help     this text
)";

std::string text_of(const CrashFile& crash) {
  std::string text = cadre::format("signal {} ({})", crash.signal, os::signal_name(crash.signal));
  if (crash.code > 0) text += cadre::format(", address {:#x}", crash.address);
  text += cadre::format(", thread {} of process {}\n", crash.thread, crash.process);
  text += to_text(symbolize(crash));
  if (!crash.is_complete) text += "the process ended before its stack was written completely\n";
  return text;
}

}  // namespace

int stack_command(Words words) {
  constexpr std::array kStackOptions{OptionSpec{"--help", "", 'h'}};
  const auto parsed = parse_words(kStackCommand, kStackOptions, OtherWords::kAmongOptions, words);
  if (!parsed.ok()) return fail(kStackCommand, parsed.error().message(), kUsageExitCode);
  if (parsed->find("--help") != nullptr) return print(kStackHelp);
  if (parsed->others.size() != 1) {
    return fail(kStackCommand, "name one crash file; cadre stack --help says which",
                kUsageExitCode);
  }
  const std::string& path = parsed->others.front();
  const auto content = os::read_file(path, kMaxCrashFileBytes);
  if (!content.ok()) return fail(kStackCommand, content.error().message(), 1);
  const auto crash = parse_crash_file(*content);
  if (!crash.ok()) {
    return fail(kStackCommand, cadre::format("{}: {}", path, crash.error().message()), 1);
  }
  // libdw would download missing debug information from the servers that this variable names.
  ::unsetenv("DEBUGINFOD_URLS");
  return print(text_of(*crash));
}

}  // namespace cadre::cli
