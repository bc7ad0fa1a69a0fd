// A FileSystem that forwards every call to the native file system. Tests override the calls that
// they change.
//
// Threads and blocking: those of the native file system.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/os/file_system.h"
#include "cadre/core/os/files/native_file_system.h"

namespace cadre::testing {

class ForwardingFiles : public os::FileSystem {
 public:
  Result<std::unique_ptr<os::OutputFile>> create(const std::string& path) override {
    return native_.create(path);
  }
  Result<std::unique_ptr<os::SizedFile>> create_sized(const std::string& path,
                                                      size_t num_bytes) override {
    return native_.create_sized(path, num_bytes);
  }
  Result<std::string> create_beside(const std::string& path) override {
    return native_.create_beside(path);
  }
  Result<std::unique_ptr<os::SharedFile>> open_shared(const std::string& path) override {
    return native_.open_shared(path);
  }
  Result<std::string> read(const std::string& path, size_t max_bytes) override {
    return native_.read(path, max_bytes);
  }
  Result<std::optional<os::FileKind>> kind_of(const std::string& path) override {
    return native_.kind_of(path);
  }
  Result<std::vector<std::string>> list(const std::string& folder) override {
    return native_.list(folder);
  }
  Status make_folder(const std::string& path) override { return native_.make_folder(path); }
  Status sync(const std::string& path) override { return native_.sync(path); }
  Status rename(const std::string& from, const std::string& to) override {
    return native_.rename(from, to);
  }
  Status exchange(const std::string& from, const std::string& to) override {
    return native_.exchange(from, to);
  }
  Status remove(const std::string& path) override { return native_.remove(path); }
  Result<std::string> make_folder_beside(const std::string& path) override {
    return native_.make_folder_beside(path);
  }

 private:
  os::NativeFileSystem native_;
};

}  // namespace cadre::testing
