// A file descriptor that closes itself. It is never 0, 1 or 2: in a program whose standard streams
// are closed, the kernel gives these numbers to the next files that are opened, and the text that a
// library prints on standard error would be sent on a connection.
//
// A program may close descriptors that it has not opened (closefrom(), a loop over all numbers, a
// library that turns the program into a daemon), and the kernel then gives their numbers to the
// program's own files. An Fd therefore remembers the inode behind its number. Code that uses an Fd
// long after it was opened calls check() first, and the destructor does not close a descriptor that
// is no longer its own. Descriptors without an inode of their own (eventfd, epoll) are
// distinguished by one of 64 marks (fd.cpp).
//
// Threads: one owner at a time; is_own() and check() from any. Blocking: never (close() does not
// wait for the kinds of files used here). Lifetime: closed by the destructor. Errors:
// kInvalidArgument, with ErrorDetails::is_own_limit because no peer is at fault.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"

namespace cadre::os {

inline constexpr mode_t kNewFileMode = 0644;  // the mode of the files that the library makes

// Replaces a descriptor by one above the standard streams, with close-on-exec. Returns -1 and sets
// errno if the process has no descriptor left.
CADRE_EXPORT int move_from_standard_streams(int number);

class CADRE_EXPORT Fd {
  struct Inode {
    uint32_t device_major = 0;
    uint32_t device_minor = 0;
    uint64_t number = 0;  // 0 if the file system has no inode numbers

    friend bool operator==(const Inode&, const Inode&) = default;
  };

 public:
  Fd() = default;
  // Takes ownership of an open descriptor, which may get another number; -1 means no descriptor.
  // Leaves errno unchanged for -1.
  explicit Fd(int number);
  Fd(Fd&& other) noexcept { *this = std::move(other); }
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { close(); }

  bool is_open() const { return number_ >= 0; }
  int get() const { return number_; }
  // Returns false if the descriptor was closed from outside, or its number belongs to another file
  // now.
  bool is_own() const;
  // Returns an error that begins with `what`, for example "write run.log", unless is_own().
  Status check(std::string_view what) const;
  // Passes ownership of the descriptor to the caller, who must close it.
  int release() { return std::exchange(number_, -1); }
  void close();

 private:
  static std::optional<Inode> inode_of(int number);

  int number_ = -1;
  Inode inode_;
};

// Returns the error of check() for a descriptor with this number.
CADRE_EXPORT Error closed_from_outside(std::string_view what, int number);

}  // namespace cadre::os
