#include "cadre/core/os/proc/temporary_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {

Result<std::string> make_unique_folder(const std::string& parent, const std::string& prefix) {
  const auto failed = [&](int error_number) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("make a folder in {}", parent),
                       error_number);
  };
  // The path is made absolute, because a process that gets it may have another working directory.
  std::error_code failure;
  const std::filesystem::path folder = std::filesystem::absolute(parent, failure);
  if (failure) return failed(failure.value());
  std::string path = (folder / (prefix + "XXXXXX")).string();
  if (::mkdtemp(path.data()) == nullptr) return failed(errno);
  // Sets all rights of the owner, because the umask may have removed some.
  if (::chmod(path.c_str(), S_IRWXU) == 0) return path;
  const int error_number = errno;
  ::rmdir(path.c_str());
  return failed(error_number);
}

Result<std::unique_ptr<TemporaryFolder>> TemporaryFolder::make(const std::string& parent,
                                                               const std::string& prefix) {
  auto path = make_unique_folder(parent, prefix);
  if (!path.ok())
    return path.error().with_context("temporary files (set TMPDIR to another folder)");
  return std::make_unique<TemporaryFolder>(*std::move(path));
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace cadre::os
