// Makes a folder for one test. The destructor deletes it with all of its files.
//
// Threads: one owner. Blocking: disk access.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "cadre/core/os/proc/temporary_folder.h"

namespace cadre::testing {

class TemporaryFolder {
 public:
  // Throws Error(kUnavailable) if the folder cannot be made.
  TemporaryFolder()
      : folder_(os::TemporaryFolder::make(std::filesystem::temp_directory_path(), "cadre-test-")
                    .value_or_throw()),
        path_(folder_->path()) {}

  const std::filesystem::path& path() const { return path_; }
  // Returns the path of the file `name` in the folder.
  std::string file(const std::string& name) const { return path_ / name; }

 private:
  std::unique_ptr<os::TemporaryFolder> folder_;
  std::filesystem::path path_;
};

}  // namespace cadre::testing
