#include "cadre/core/os/proc/temporary_folder.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {

Result<std::unique_ptr<TemporaryFolder>> TemporaryFolder::make(const std::string& parent,
                                                               const std::string& prefix) {
  const auto failed = [&](int error_number) {
    return errno_error(
        ErrorCode::kUnavailable,
        cadre::format("make a temporary folder in {} (set TMPDIR to another)", parent),
        error_number);
  };
  // The path is made absolute, because a process that gets it may have another working directory.
  std::error_code failure;
  const std::filesystem::path folder = std::filesystem::absolute(parent, failure);
  if (failure) return failed(failure.value());
  std::string path = (folder / (prefix + "XXXXXX")).string();
  if (::mkdtemp(path.data()) == nullptr) return failed(errno);
  auto made = std::make_unique<TemporaryFolder>(std::move(path));
  // Sets all rights of the owner, because the umask may have removed some.
  if (::chmod(made->path().c_str(), S_IRWXU) != 0) return failed(errno);
  return made;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace cadre::os
