// Makes folders with unique names. A TemporaryFolder removes its folder when it is destroyed.
//
// Threads: one owner. Blocking: for the time of the file system.
// Lifetime: the destructor removes the folder and its content; a removal that fails is ignored.
// Errors: both functions return kUnavailable with the path and the system's reason.
#pragma once

#include <memory>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre::os {

// Makes a folder in `parent`, readable by this user only, and returns its absolute path. Its name
// is `prefix` and six random letters.
CADRE_EXPORT Result<std::string> make_unique_folder(const std::string& parent,
                                                    const std::string& prefix);

class CADRE_EXPORT TemporaryFolder {
 public:
  // Makes the folder as make_unique_folder() does.
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
