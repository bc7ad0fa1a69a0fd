// The seam to files that must survive a failing disk, a killed process or a power cut: what writes
// them takes a FileSystem, so that tests give it the simulator's disk
// (cadre/core/sim/simulated_disk.h).
//
// Threads: a FileSystem, any; a file, one at a time. Blocking: for the time of the disk; taking a
// lock never waits. Lifetime: a FileSystem outlives its files, which are closed by the destructor.
// Errors: kUnavailable with the path and the system's reason (a full disk, missing rights).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::os {

// A file that is written from its beginning. Closing it does not sync it.
class CADRE_EXPORT OutputFile {
 public:
  virtual ~OutputFile() = default;
  // Appends all of the data; after an error part of it may be in the file.
  virtual Status write(ConstBytes data) = 0;
  virtual Status sync() = 0;
};

// A file that several processes append to: read at any place, appended under a lock, and removed by
// the last one that has it open. The locks of a process that dies are dropped.
class CADRE_EXPORT SharedFile {
 public:
  virtual ~SharedFile() = default;

  // The right to write. False while another handle has it.
  virtual Result<bool> try_lock() = 0;
  virtual void unlock() = 0;
  // Marks this handle as present; with the lock held it does not fail because of others.
  virtual Status enter() = 0;
  // Whether no other handle is present. REQUIRES: enter() and the lock.
  virtual Result<bool> is_alone() = 0;
  // Ends what enter() began, as closing does; but by then another handle may have the lock.
  virtual void leave() = 0;

  virtual Result<size_t> size() const = 0;
  // Up to buffer.size() bytes from `offset`; fewer at the end of the file.
  virtual Result<size_t> read_at(size_t offset, Bytes buffer) const = 0;
  // Writes at `offset`, the end. After an error the file ends there again, unless truncating it
  // failed as well.
  virtual Status append_at(size_t offset, ConstBytes data) = 0;
  virtual Status truncate(size_t num_bytes) = 0;
  // Whether the path still names this file: another process may have removed it.
  virtual bool is_named() const = 0;
  virtual Status remove() = 0;
};

// A file of fixed size that is written by writing its bytes. FileSystem::sync() makes it durable.
class CADRE_EXPORT SizedFile {
 public:
  virtual ~SizedFile() = default;
  virtual Bytes bytes() = 0;
};

enum class FileKind {
  kFile,
  kFolder,
  kLink,  // a symbolic link, to whatever
};

class CADRE_EXPORT FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Creates the file, or empties it.
  virtual Result<std::unique_ptr<OutputFile>> create(const std::string& path) = 0;
  // Creates or replaces the file, zeroed, with its space reserved: a full disk is an error here,
  // not a signal at a later write. num_bytes: at least 1.
  virtual Result<std::unique_ptr<SizedFile>> create_sized(const std::string& path,
                                                          size_t num_bytes) = 0;
  // Creates an empty file in the folder of `path`, with a name that no other file has, and returns
  // the name.
  virtual Result<std::string> create_beside(const std::string& path) = 0;
  // The same for a folder, which others may read.
  virtual Result<std::string> make_folder_beside(const std::string& path) = 0;
  // Creates the file, if it does not exist, for its owner alone.
  virtual Result<std::unique_ptr<SharedFile>> open_shared(const std::string& path) = 0;
  // The whole file; kInvalidArgument if it has more than `max_bytes`.
  virtual Result<std::string> read(const std::string& path, size_t max_bytes) = 0;
  // nullopt if nothing has the name.
  virtual Result<std::optional<FileKind>> kind_of(const std::string& path) = 0;
  // The names in the folder, sorted.
  virtual Result<std::vector<std::string>> list(const std::string& folder) = 0;
  virtual Status make_folder(const std::string& path) = 0;
  // Makes the content of a file, or the entries of a folder, durable.
  virtual Status sync(const std::string& path) = 0;
  // Replaces a file, or an empty folder, at `to`.
  virtual Status rename(const std::string& from, const std::string& to) = 0;
  // The two names change places in one step.
  virtual Status exchange(const std::string& from, const std::string& to) = 0;
  // Removes a file or an empty folder.
  virtual Status remove(const std::string& path) = 0;
};

}  // namespace cadre::os
