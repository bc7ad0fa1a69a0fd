#include "cadre/core/os/host/secret_variable.h"

#include <string.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "cadre/core/os/files/file.h"
#include "cadre/core/os/host/process_stat.h"

namespace cadre::os {
namespace {

// Returns whether `text` lies where the kernel put the environment when the program started; fields
// 50 and 51 of /proc/self/stat are these bounds. Field 2 ends with the last ')', so the text after
// it begins with field 3.
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

struct Taken {
  std::mutex mutex;
  std::map<std::string, Secret> secrets;  // mutex guards it
};

// The environment belongs to the whole process, and so do the secrets taken from it.
Taken& taken() {
  static Taken all;
  return all;
}

}  // namespace

std::optional<Secret> take_secret_variable(const std::string& name) {
  Taken& all = taken();
  const std::lock_guard lock(all.mutex);
  char* value = std::getenv(name.c_str());
  if (value == nullptr) return std::nullopt;
  if (*value != '\0') {
    all.secrets[name] = Secret(value);
    // A variable that the program itself has set may refer to a constant text, which must not be
    // overwritten.
    if (is_in_first_environment(value)) {
      ::explicit_bzero(value, ::strlen(value));
    } else {
      ::setenv(name.c_str(), "", 1);
    }
  }
  const auto found = all.secrets.find(name);
  return found == all.secrets.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace cadre::os
