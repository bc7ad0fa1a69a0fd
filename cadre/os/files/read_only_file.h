// A file mapped for reading: gigabytes of text or tensors without a copy.
//
// Threads: the bytes from any thread. Blocking: reading a byte may wait for the disk.
// Lifetime: unmapped by the destructor. The file must not be cut short meanwhile: reading a byte
// that is gone ends the process (SIGBUS), as with every mapping; versioned_file.h reads without
// one. Errors: kUnavailable with the path and the system's reason.
#pragma once

#include <string>

#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/base/types.h"

namespace cadre::os {

class CADRE_EXPORT ReadOnlyFile {
 public:
  static Result<ReadOnlyFile> open(const std::string& path);

  ReadOnlyFile(ReadOnlyFile&& other) noexcept;
  ReadOnlyFile& operator=(ReadOnlyFile&& other) noexcept;
  ~ReadOnlyFile();

  ConstBytes bytes() const { return bytes_; }

 private:
  explicit ReadOnlyFile(ConstBytes bytes) : bytes_(bytes) {}

  ConstBytes bytes_;
};

}  // namespace cadre::os
