#include "cadre/core/os/host/secret_file.h"

#include <string.h>
#include <sys/stat.h>

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"

namespace cadre::os {

Result<SecretFile> read_secret_file(const std::string& path) {
  constexpr size_t kMaxSecretFileBytes = 4096;
  constexpr const char* kSpaces = " \t\r";
  auto content = read_file(path, kMaxSecretFileBytes);
  if (!content.ok()) return content.error();
  std::string& line = *content;
  // The rest is overwritten because it may be older secrets.
  const size_t end = line.find('\n');
  if (end != std::string::npos) {
    ::explicit_bzero(line.data() + end, line.size() - end);
    line.resize(end);
  }
  line.resize(line.find_last_not_of(kSpaces) + 1);
  line.erase(0, line.find_first_not_of(kSpaces));
  if (line.empty()) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("the first line of {} is empty; expected a secret there", path));
  }
  struct stat info {};
  const bool is_private =
      ::stat(path.c_str(), &info) == 0 && (info.st_mode & (S_IRGRP | S_IROTH)) == 0;
  return SecretFile{.secret = Secret(std::move(line)), .is_private = is_private};
}

}  // namespace cadre::os
