#include "cadre/os/files/file_identity.h"

#include <sys/stat.h>

#include <cerrno>

#include "cadre/base/format.h"
#include "cadre/os/io/errno_error.h"

namespace cadre::os {

Result<FileIdentity> file_identity(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) {
    return errno_error(ErrorCode::kUnavailable, cadre::format("look at {}", path), errno);
  }
  return FileIdentity{.device = status.st_dev, .inode = status.st_ino};
}

}  // namespace cadre::os
