#include "cadre/cli/command.h"

#include <cstdio>

#include "cadre/base/format.h"

namespace cadre::cli {

int fail(std::string_view command, std::string_view sentence, int exit_code) {
  const std::string line = cadre::format("{}: {}\n", command, sentence);
  std::fwrite(line.data(), 1, line.size(), stderr);
  return exit_code;
}

void print(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
}

}  // namespace cadre::cli
