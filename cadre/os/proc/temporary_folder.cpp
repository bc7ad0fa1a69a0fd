#include "cadre/os/proc/temporary_folder.h"

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "cadre/base/format.h"
#include "cadre/os/io/errno_error.h"

namespace cadre::os {

Result<std::unique_ptr<TemporaryFolder>> TemporaryFolder::make(const std::string& parent,
                                                               const std::string& prefix) {
  std::string path = cadre::format("{}/{}XXXXXX", parent, prefix);
  if (::mkdtemp(path.data()) == nullptr) {
    return errno_error(
        ErrorCode::kUnavailable,
        cadre::format("make a temporary folder in {} (set TMPDIR to another)", parent), errno);
  }
  return std::make_unique<TemporaryFolder>(std::move(path));
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace cadre::os
