// A regular file that is read by position and notices that it was changed.
//
// Reads copy, so a file that is cut short is an error. With a mapping it would end the process
// (SIGBUS). Threads: all methods const and callable from any. Blocking: reads wait for the
// disk. Lifetime: owns a descriptor, so a file that is replaced or removed by its name stays
// readable as it was. Errors: kUnavailable with the path and the system's reason; kInvalidArgument
// for a pipe, a socket or a device, and with the path for a file that has changed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"
#include "cadre/core/os/files/regular_file.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::os {

// Differs if the file of a name was written, cut short or replaced. A program that restores the
// time of the last change is not noticed.
struct FileVersion {
  FileIdentity identity;
  uint64_t num_bytes = 0;
  int64_t modified_ns = 0;  // since 1970

  friend bool operator==(const FileVersion&, const FileVersion&) = default;
};

// The version of the file to which the path leads now.
CADRE_EXPORT Result<FileVersion> file_version(const std::string& path);

class CADRE_EXPORT VersionedFile {
 public:
  static Result<VersionedFile> open(const std::string& path);

  const std::string& path() const { return path_; }
  // When it was opened.
  const FileVersion& version() const { return version_; }
  // Of the open file now.
  Result<FileVersion> current_version() const;

  // Fills `out` with the bytes from `offset` on. A file that ends before is an error.
  Status read_at(size_t offset, Bytes out) const;

 private:
  VersionedFile(Fd fd, std::string path, const FileVersion& version)
      : fd_(std::move(fd)), path_(std::move(path)), version_(version) {}

  Fd fd_;
  std::string path_;
  FileVersion version_;
};

// The whole file in pieces of up to kPieceBytes, in memory that next() uses again. One thread.
class CADRE_EXPORT FilePieces {
 public:
  static constexpr size_t kPieceBytes = size_t{4} << 20;

  // `file` outlives this.
  explicit FilePieces(const VersionedFile& file) : file_(file) {}
  // An empty one behind the last. Errors of VersionedFile::read_at().
  Result<ConstBytes> next();

 private:
  const VersionedFile& file_;
  std::vector<std::byte> buffer_;
  size_t offset_ = 0;
};

// For a message: what has changed, "has 10 bytes instead of 20".
CADRE_EXPORT std::string change_text(const FileVersion& before, const FileVersion& now);

}  // namespace cadre::os
