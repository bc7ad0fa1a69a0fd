#include "cadre/core/os/proc/environment.h"

#include <unistd.h>

namespace cadre::os {

std::optional<std::string> Environment::get(std::string_view name) const {
  const auto found = values_.find(name);
  if (found == values_.end()) return std::nullopt;
  return found->second;
}

std::string Environment::get_or(std::string_view name, std::string_view otherwise) const {
  auto value = get(name);
  return value && !value->empty() ? *std::move(value) : std::string(otherwise);
}

void Environment::set(std::string_view name, std::string_view value) {
  values_.insert_or_assign(std::string(name), std::string(value));
}

std::vector<std::string> Environment::to_texts() const {
  std::vector<std::string> texts;
  for (const auto& [name, value] : values_) texts.push_back(name + "=" + value);
  return texts;
}

Environment read_environment() {
  Environment environment;
  for (char** entry = ::environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    // If a name occurs twice, the first value counts, as for getenv().
    const std::string_view name = text.substr(0, equals);
    if (!environment.get(name)) environment.set(name, text.substr(equals + 1));
  }
  return environment;
}

}  // namespace cadre::os
