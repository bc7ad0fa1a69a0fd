// The interface to files that must survive a failing disk, a killed process or a power cut. Code
// that writes such files takes a FileSystem, so that tests can pass the simulator's disk
// (cadre/core/sim/simulated_disk.h).
//
// Threads: a FileSystem may be used by any thread, a file by one at a time. Blocking: for the time
// of the disk; taking a lock never waits. Lifetime: a FileSystem outlives its files, which are
// closed by the destructor.
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
  // Appends all of the data; after an error a part of the data may be in the file.
  virtual Status write(ConstBytes data) = 0;
  virtual Status sync() = 0;
};

// A file to which several processes append. It is read at any position, appended under a lock, and
// removed by the last process that has it open. The locks of a process that dies are released.
class CADRE_EXPORT SharedFile {
 public:
  virtual ~SharedFile() = default;

  // Tries to lock the file for writing; returns false while another handle has the lock.
  virtual Result<bool> try_lock() = 0;
  virtual void unlock() = 0;
  // Marks this handle as a user of the file; is_alone() looks for these marks. While this handle
  // has the lock, other handles cannot make the call fail.
  virtual Status enter() = 0;
  // Returns whether no other handle is marked by enter(). REQUIRES: enter() was called, and the
  // lock is held.
  virtual Result<bool> is_alone() = 0;
  // Removes the mark that enter() has set; closing the file does so, too. May be called while
  // another handle has the lock.
  virtual void leave() = 0;

  virtual Result<size_t> size() const = 0;
  // Reads up to buffer.size() bytes from `offset`; reads fewer at the end of the file.
  virtual Result<size_t> read_at(size_t offset, Bytes buffer) const = 0;
  // Writes at `offset`, which must be the end of the file. After an error the file is truncated to
  // `offset`, unless truncating fails as well.
  virtual Status append_at(size_t offset, ConstBytes data) = 0;
  virtual Status truncate(size_t num_bytes) = 0;
  // Returns whether the path still names this file: another process may have removed it.
  virtual bool is_named() const = 0;
  virtual Status remove() = 0;
};

// A file of fixed size whose bytes the caller writes in memory. FileSystem::sync() makes it
// durable.
class CADRE_EXPORT SizedFile {
 public:
  virtual ~SizedFile() = default;
  virtual Bytes bytes() = 0;
};

enum class FileKind {
  kFile,
  kFolder,
  kLink,  // a symbolic link, whatever it leads to
};

class CADRE_EXPORT FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Creates the file, or empties it.
  virtual Result<std::unique_ptr<OutputFile>> create(const std::string& path) = 0;
  // Creates or replaces the file, filled with zeros, and reserves its space: a full disk is an
  // error here, not a signal at a later write. `num_bytes` is at least 1.
  virtual Result<std::unique_ptr<SizedFile>> create_sized(const std::string& path,
                                                          size_t num_bytes) = 0;
  // Creates an empty file in the folder of `path`, with a name that no other file has, and returns
  // the name.
  virtual Result<std::string> create_beside(const std::string& path) = 0;
  // Creates a folder beside `path` with a new name, which other users may read. Returns the name.
  virtual Result<std::string> make_folder_beside(const std::string& path) = 0;
  // Opens the file. Creates it, if it does not exist, with rights for its owner only.
  virtual Result<std::unique_ptr<SharedFile>> open_shared(const std::string& path) = 0;
  // Returns the whole file; kInvalidArgument if it has more than `max_bytes`.
  virtual Result<std::string> read(const std::string& path, size_t max_bytes) = 0;
  // Returns the kind of the file at `path`; nullopt if nothing has this name.
  virtual Result<std::optional<FileKind>> kind_of(const std::string& path) = 0;
  // Returns the names in the folder, sorted.
  virtual Result<std::vector<std::string>> list(const std::string& folder) = 0;
  virtual Status make_folder(const std::string& path) = 0;
  // Makes the content of a file, or the entries of a folder, durable.
  virtual Status sync(const std::string& path) = 0;
  // Renames `from` to `to`. Replaces a file, or an empty folder, at `to`.
  virtual Status rename(const std::string& from, const std::string& to) = 0;
  // Exchanges the two names atomically.
  virtual Status exchange(const std::string& from, const std::string& to) = 0;
  // Removes a file or an empty folder.
  virtual Status remove(const std::string& path) = 0;
};

}  // namespace cadre::os
