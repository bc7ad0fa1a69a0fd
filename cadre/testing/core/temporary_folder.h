// A folder for one test, removed with all it holds by the destructor.
//
// Threads: one owner. Blocking: for the time of the disk.
#pragma once

#include <filesystem>
#include <string>

namespace cadre::testing {

class TemporaryFolder {
 public:
  // Throws Error(kUnavailable) when none can be made.
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // The path of a file in it.
  std::string file(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

}  // namespace cadre::testing
