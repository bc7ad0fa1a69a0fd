#include "cadre/launch/cli/command.h"

#include <signal.h>

#include <algorithm>
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

std::string wrapped(std::string_view sentence, std::string_view indent) {
  std::string text;
  std::string line(indent);
  while (!sentence.empty()) {
    const std::string_view word = sentence.substr(0, sentence.find(' '));
    const bool is_first = line.size() == indent.size();
    if (!is_first && line.size() + 1 + word.size() > kTextWidth) {
      text += line + "\n";
      line = std::string(indent).append(word);
    } else {
      line += is_first ? std::string(word) : cadre::format(" {}", word);
    }
    sentence.remove_prefix(std::min(word.size() + 1, sentence.size()));
  }
  return text + line + "\n";
}

std::string readable_size(uint64_t num_bytes) {
  const auto count = static_cast<double>(num_bytes);
  if (num_bytes >= 1 << 30) return cadre::format("{:.1f} GiB", count / (1 << 30));
  if (num_bytes >= 1 << 20) return cadre::format("{:.1f} MiB", count / (1 << 20));
  return cadre::format("{:.1f} KiB", count / (1 << 10));
}

}  // namespace cadre::cli
