#include "cadre/launch/job/output/line_prefix.h"

#include <array>
#include <cstddef>
#include <span>
#include <utility>

#include "cadre/core/base/format.h"

namespace cadre::launch {
namespace {

using Macro = std::pair<std::string_view, std::string>;

std::string with_macros(std::string_view text, std::span<const Macro> macros) {
  std::string result;
  while (!text.empty()) {
    size_t taken = 1;
    std::string_view shown = text.substr(0, 1);
    for (const auto& [name, value] : macros) {
      if (!text.starts_with(name)) continue;
      taken = name.size();
      shown = value;
    }
    result += shown;
    text.remove_prefix(taken);
  }
  return result;
}

}  // namespace

std::string line_prefix(std::string_view pattern, const PrefixValues& values) {
  const std::string rank = cadre::format("{}", values.rank);
  const std::array macros{Macro{"${rank}", rank}, Macro{"${local_rank}", rank},
                          Macro{"${role_name}", values.role}, Macro{"${host}", values.host},
                          Macro{"${restart_count}", cadre::format("{}", values.restart_count)}};
  return with_macros(pattern, macros);
}

std::string coloured(std::string_view prefix, Rank rank) {
  constexpr std::array kColours{36, 33, 35, 32, 34, 31};
  return cadre::format("\x1b[{}m{}\x1b[0m", kColours[static_cast<size_t>(rank) % kColours.size()],
                       prefix);
}

std::string with_local_rank(std::string_view argument, Rank rank) {
  const std::array macros{Macro{"${local_rank}", cadre::format("{}", rank)}};
  return with_macros(argument, macros);
}

}  // namespace cadre::launch
