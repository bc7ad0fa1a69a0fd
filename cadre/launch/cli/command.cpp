#include "cadre/launch/cli/command.h"

#include <signal.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

#include "cadre/core/base/format.h"

namespace cadre::cli {

int fail(std::string_view command, std::string_view sentence, int exit_code) {
  const std::string line = cadre::format("{}: {}\n", command, sentence);
  std::fwrite(line.data(), 1, line.size(), stderr);
  return exit_code;
}

int print(std::string_view text) {
  const bool is_written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (std::fflush(stdout) == 0 && is_written) return 0;
  if (errno == EPIPE) return 128 + SIGPIPE;
  const std::error_code reason(errno, std::generic_category());
  return fail("cadre", cadre::format("standard output: {}", reason.message()), 1);
}

}  // namespace cadre::cli
