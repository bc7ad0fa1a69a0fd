#include "cadre/testing/core/temporary_folder.h"

#include <stdlib.h>

#include <cerrno>
#include <system_error>

#include "cadre/core/os/io/errno_error.h"

namespace cadre::testing {

TemporaryFolder::TemporaryFolder() {
  std::string name = std::filesystem::temp_directory_path() / "cadre-test-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) {
    throw os::errno_error(ErrorCode::kUnavailable, "make folder " + name, errno);
  }
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;  // nothing better to do in a destructor
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace cadre::testing
