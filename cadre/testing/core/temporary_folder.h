// Makes a folder for one test. The destructor removes it with everything in it.
//
// Threads: one owner. Blocking: for the time of the disk.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "cadre/core/os/proc/temporary_folder.h"

namespace cadre::testing {

class TemporaryFolder {
 public:
  // Throws Error(kUnavailable) if no folder can be made.
  TemporaryFolder()
      : folder_(os::TemporaryFolder::make(std::filesystem::temp_directory_path(), "cadre-test-")
                    .value_or_throw()),
        path_(folder_->path()) {}

  const std::filesystem::path& path() const { return path_; }
  // Returns the path of a file in the folder.
  std::string file(const std::string& name) const { return path_ / name; }

 private:
  std::unique_ptr<os::TemporaryFolder> folder_;
  std::filesystem::path path_;
};

}  // namespace cadre::testing
