#include "cadre/core/os/files/private_folder.h"

#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"

namespace cadre::os {
namespace {

constexpr mode_t kPrivateFolderMode = 0700;

}  // namespace

Status make_private_folder(const std::string& path) {
  // Removes a slash at the end: "a/b/" is the folder "a/b".
  const std::filesystem::path folder =
      path.ends_with('/') ? std::filesystem::path(path).parent_path() : std::filesystem::path(path);
  std::error_code failure;
  if (folder.has_parent_path()) std::filesystem::create_directories(folder.parent_path(), failure);
  if (!failure && ::mkdir(folder.c_str(), kPrivateFolderMode) != 0 &&
      !(errno == EEXIST && std::filesystem::is_directory(folder, failure))) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("create the folder {}", path), errno);
  }
  if (!failure) return {};
  return Error(ErrorCode::kUnavailable,
               cadre::format("create the folder {}: {}", path, failure.message()));
}

}  // namespace cadre::os
