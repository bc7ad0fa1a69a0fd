// A file of fixed size, mapped read-write and shared: what is written survives kill -9 of the
// writer, because the pages belong to the file.
//
// Threads: the bytes from any thread; the caller synchronizes the accesses. Blocking: create() for
// the time of the disk. Lifetime: unmapped by the destructor; the file stays.
// Errors: kUnavailable with the path (missing folder, full disk).
#pragma once

#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::os {

class CADRE_EXPORT MappedFile {
 public:
  // The users who may read the file: its owner only (0600), or all users (0644) unless the process'
  // umask forbids it.
  enum class Readers : bool { kUser, kAll };

  // Creates or replaces the file, filled with zeros, with its blocks reserved: a full disk is an
  // error here and not a SIGBUS later. The folder must exist.
  static Result<MappedFile> create(const std::string& path, size_t num_bytes,
                                   Readers readers = Readers::kAll);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  Bytes bytes() const { return bytes_; }

 private:
  explicit MappedFile(Bytes bytes) : bytes_(bytes) {}

  Bytes bytes_;
};

}  // namespace cadre::os
