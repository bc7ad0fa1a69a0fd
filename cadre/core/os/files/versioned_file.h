// A regular file that is read by position, with a check whether it was changed.
//
// Reads copy the bytes, so a file that was truncated gives an error. With a mapping it would end
// the process (SIGBUS). Threads: all methods are const and callable from any. Blocking: reads wait
// for the disk. Lifetime: owns a descriptor, so a file that is replaced or removed under its name
// stays readable with its old content. Errors: kUnavailable with the path and the system's reason;
// kInvalidArgument for a pipe, a socket or a device, and with the path for a file that has changed.
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

// The version of a file, which differs after the file was written, truncated or replaced. A write
// after which a program restores the modification time is not detected.
struct FileVersion {
  FileIdentity identity;
  uint64_t num_bytes = 0;
  int64_t modified_ns = 0;  // the time of the last change in nanoseconds since 1970

  friend bool operator==(const FileVersion&, const FileVersion&) = default;
};

// Returns the present version of the file at `path`.
CADRE_EXPORT Result<FileVersion> file_version(const std::string& path);

class CADRE_EXPORT VersionedFile {
 public:
  static Result<VersionedFile> open(const std::string& path);

  const std::string& path() const { return path_; }
  // The version that the file had when it was opened.
  const FileVersion& version() const { return version_; }
  // Returns the version that the open file has now.
  Result<FileVersion> current_version() const;

  // Fills `out` with the bytes from `offset` on. Fails if the file has fewer bytes.
  Status read_at(size_t offset, Bytes out) const;

 private:
  VersionedFile(Fd fd, std::string path, const FileVersion& version)
      : fd_(std::move(fd)), path_(std::move(path)), version_(version) {}

  Fd fd_;
  std::string path_;
  FileVersion version_;
};

// Reads the whole file in pieces of up to kPieceBytes. next() reuses the memory. Used by one
// thread.
class CADRE_EXPORT FilePieces {
 public:
  static constexpr size_t kPieceBytes = size_t{4} << 20;

  // REQUIRES: `file` outlives this object.
  explicit FilePieces(const VersionedFile& file) : file_(file) {}
  // Returns the next piece, and an empty one after the last. The errors are those of
  // VersionedFile::read_at().
  Result<ConstBytes> next();

 private:
  const VersionedFile& file_;
  std::vector<std::byte> buffer_;
  size_t offset_ = 0;
};

// Returns what has changed, as a part of a message, for example "has 10 bytes instead of 20".
CADRE_EXPORT std::string change_text(const FileVersion& before, const FileVersion& now);

}  // namespace cadre::os
