// The FileSystem of the operating system.
//
// Threads, blocking and errors: as described in file_system.h. Lifetime: the object has no state,
// so each caller may make its own.
#pragma once

#include "cadre/core/os/file_system.h"

namespace cadre::os {

class CADRE_EXPORT NativeFileSystem final : public FileSystem {
 public:
  Result<std::unique_ptr<OutputFile>> create(const std::string& path) override;
  Result<std::unique_ptr<SizedFile>> create_sized(const std::string& path,
                                                  size_t num_bytes) override;
  Result<std::string> create_beside(const std::string& path) override;
  Result<std::string> make_folder_beside(const std::string& path) override;
  Result<std::unique_ptr<SharedFile>> open_shared(const std::string& path) override;
  Result<std::string> read(const std::string& path, size_t max_bytes) override;
  Result<std::optional<FileKind>> kind_of(const std::string& path) override;
  Result<std::vector<std::string>> list(const std::string& folder) override;
  Status make_folder(const std::string& path) override;
  Status sync(const std::string& path) override;
  Status rename(const std::string& from, const std::string& to) override;
  Status exchange(const std::string& from, const std::string& to) override;
  Status remove(const std::string& path) override;
};

}  // namespace cadre::os
