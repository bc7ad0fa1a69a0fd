// A secret that is kept in a file.
//
// Threads: any. Blocking: for the time of the disk. Errors: those of read_file();
// kInvalidArgument for a file whose first line is empty.
#pragma once

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/os/host/secret.h"

namespace cadre::os {

struct SecretFile {
  Secret secret;
  bool is_private = false;  // neither the group nor other users may read the file
};

// Returns the first line of the file, without the white space around it.
Result<SecretFile> read_secret_file(const std::string& path);

}  // namespace cadre::os
