#include "cadre/os/host/secret_variable.h"

#include <string.h>
#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "cadre/os/host/process_stat.h"
#include "cadre/os/io/file.h"

namespace cadre::os {
namespace {

// Whether the kernel put this text there when the program was started: fields 50 and 51 of
// /proc/self/stat, counted from the last ')', after which field 3 comes.
bool is_in_first_environment(const char* text) {
  const auto stat = read_file("/proc/self/stat", kMaxStatBytes);
  if (!stat.ok()) return false;
  std::istringstream fields(stat->substr(stat->rfind(')') + 1));
  std::string skipped;
  for (int field = 3; field < 50; ++field) fields >> skipped;
  uintptr_t begin = 0;
  uintptr_t end = 0;
  fields >> begin >> end;
  const auto at = reinterpret_cast<uintptr_t>(text);
  return fields && at >= begin && at < end;
}

// Memory that core files leave out.
class HiddenText {
 public:
  explicit HiddenText(std::string_view text) : size_(text.size()) {
    void* memory =
        ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return;
    ::madvise(memory, size_, MADV_DONTDUMP);
    data_ = static_cast<char*>(memory);
    text.copy(data_, size_);
  }
  ~HiddenText() {
    if (data_ == nullptr) return;
    ::explicit_bzero(data_, size_);
    ::munmap(data_, size_);
  }
  HiddenText(const HiddenText&) = delete;
  HiddenText& operator=(const HiddenText&) = delete;

  std::string_view view() const { return {data_, data_ == nullptr ? 0 : size_}; }

 private:
  char* data_ = nullptr;
  size_t size_;
};

// The environment is the process's, so what was taken from it is, too.
struct Taken {
  std::mutex mutex;
  std::map<std::string, HiddenText> texts;  // guarded by mutex
};

Taken& taken() {
  static Taken all;
  return all;
}

}  // namespace

std::optional<std::string> take_secret_variable(const std::string& name) {
  Taken& all = taken();
  const std::lock_guard lock(all.mutex);
  char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  if (*value != '\0') {
    all.texts.erase(name);
    all.texts.try_emplace(name, value);
    // A text that the program put there itself may be a constant; it is replaced.
    if (is_in_first_environment(value)) {
      ::explicit_bzero(value, ::strlen(value));
    } else {
      ::setenv(name.c_str(), "", 1);
    }
  }
  const auto found = all.texts.find(name);
  if (found == all.texts.end()) return std::nullopt;
  return std::string(found->second.view());
}

}  // namespace cadre::os
