// Simulates a faulty program that closes descriptors of Cadre and opens a file of its own, which
// gets the same descriptor number. If Cadre then wrote to this number, it would damage the
// program's file.
//
// Threads: one thread. Lifetime: the descriptors stay open until the process ends or they are
// closed.
#pragma once

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

namespace cadre::testing {

// Closes a descriptor of Cadre, as a faulty program may do. Makes the system call directly, because
// ThreadSanitizer would report the close as a race with a thread that still uses the descriptor,
// which is intended here.
inline void close_from_outside(int number) {
  ::syscall(SYS_close, number);
}

class ProgramFile {
 public:
  explicit ProgramFile(std::string path) : path_(std::move(path)) {
    std::ofstream(path_) << content();
  }

  // Closes the descriptor `number`, and opens the file under this number.
  void take_number(int number) const {
    const int fd = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
    ::syscall(SYS_dup3, fd, number, O_CLOEXEC);
    ::close(fd);
  }
  // Returns whether the content of the file is unchanged.
  bool is_intact() const {
    std::ifstream file(path_);
    return std::string(std::istreambuf_iterator<char>(file), {}) == content();
  }
  // Returns whether the number still refers to the file, and whether its offset is still 0, that
  // is, nothing was read or written through it.
  static bool is_open(int number) { return ::lseek(number, 0, SEEK_CUR) == 0; }

 private:
  static std::string content() { return std::string(256 << 10, 'A'); }

  std::string path_;
};

// Returns the numbers of all open descriptors of this process.
inline std::set<int> open_descriptors() {
  std::set<int> numbers;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    numbers.insert(std::stoi(entry.path().filename().string()));
  }
  std::erase_if(numbers, [](int number) { return ::fcntl(number, F_GETFD) < 0; });
  return numbers;
}

// Returns the descriptors that were opened since `before`.
inline std::set<int> opened_since(const std::set<int>& before) {
  std::set<int> numbers = open_descriptors();
  std::erase_if(numbers, [&](int number) { return before.contains(number); });
  return numbers;
}

}  // namespace cadre::testing
