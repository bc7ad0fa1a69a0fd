// The environment of this process, read once and then passed down as a value.
//
// Threads: plain values; call read_environment() before any thread changes the environment.
// Blocking: never.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cadre::os {

class Environment {
 public:
  std::optional<std::string> get(std::string_view name) const;
  // Returns the value, or `otherwise` if the variable is absent or empty.
  std::string get_or(std::string_view name, std::string_view otherwise) const;
  void set(std::string_view name, std::string_view value);

  // Returns "NAME=value" texts, sorted by name, as execve() needs them.
  std::vector<std::string> to_texts() const;

 private:
  std::map<std::string, std::string, std::less<>> values_;
};

Environment read_environment();

}  // namespace cadre::os
