// A folder of this process, which is removed when the TemporaryFolder is destroyed.
//
// Threads: one owner. Blocking: for the time of the file system.
// Lifetime: the destructor removes the folder and its content; a removal that fails is ignored.
// Errors: make() returns kUnavailable with the path and the system's reason.
#pragma once

#include <memory>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre::os {

class CADRE_EXPORT TemporaryFolder {
 public:
  // Makes the folder in `parent`, readable by this user only. Its name is `prefix` and six random
  // letters.
  static Result<std::unique_ptr<TemporaryFolder>> make(const std::string& parent,
                                                       const std::string& prefix);
  explicit TemporaryFolder(std::string path) : path_(std::move(path)) {}
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

}  // namespace cadre::os
