// A file descriptor that closes itself.
//
// Threads: one owner at a time. Blocking: never (close of the kinds used here does not wait).
// Lifetime: closed by the destructor.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <utility>

namespace cadre::os {

inline constexpr mode_t kNewFileMode = 0644;  // of the files that the library makes

class Fd {
 public:
  Fd() = default;
  explicit Fd(int number) : number_(number) {}
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
