// A file descriptor that closes itself. It is never 0, 1 or 2: in a program whose standard streams
// are closed the kernel gives these numbers to what is opened next, and what a library prints on
// standard error would go into a connection.
//
// Threads: one owner at a time. Blocking: never (close of the kinds used here does not wait).
// Lifetime: closed by the destructor.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <utility>

#include "cadre/base/export.h"

namespace cadre::os {

inline constexpr mode_t kNewFileMode = 0644;  // mode of the files that the library makes

// Replaces a descriptor by one above the standard streams, with close-on-exec; -1 and errno if the
// process has none left.
CADRE_EXPORT int move_from_standard_streams(int number);

class Fd {
 public:
  Fd() = default;
  // Takes an open descriptor, which may get another number; or -1, and leaves errno as it is then.
  explicit Fd(int number)
      : number_(number < 0 || number > STDERR_FILENO ? number
                                                     : move_from_standard_streams(number)) {}
  Fd(Fd&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      close();
      number_ = std::exchange(other.number_, -1);
    }
    return *this;
  }
  ~Fd() { close(); }

  bool is_open() const { return number_ >= 0; }
  int get() const { return number_; }
  // Gives the number to the caller, who closes it.
  int release() { return std::exchange(number_, -1); }
  void close() {
    // After EINTR Linux has closed the descriptor all the same, so there is nothing to repeat.
    if (number_ >= 0) ::close(std::exchange(number_, -1));
  }

 private:
  int number_ = -1;
};

}  // namespace cadre::os
