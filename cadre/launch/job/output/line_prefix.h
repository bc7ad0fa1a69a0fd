// The text before each line of a worker's output, and other texts that contain a worker's numbers.
//
// Threads: pure functions. Blocking: never. Source: torchrun's --log-line-prefix-template and
// ${local_rank} in arguments.
#pragma once

#include <string>
#include <string_view>

#include "cadre/core/base/types.h"

namespace cadre::launch {

// The values that replace the placeholders. `rank` replaces both ${rank} and ${local_rank}, which
// are equal on one host.
struct PrefixValues {
  Rank rank;
  std::string role;
  std::string host;
  int restart_count = 0;
};

// Replaces ${rank}, ${local_rank}, ${role_name}, ${host} and ${restart_count}. A placeholder inside
// a value is not replaced.
std::string line_prefix(std::string_view pattern, const PrefixValues& values);

// Returns the prefix in a colour of the rank that is readable on light and on dark terminals.
std::string coloured(std::string_view prefix, Rank rank);

// Replaces ${local_rank} in the argument.
std::string with_local_rank(std::string_view argument, Rank rank);

}  // namespace cadre::launch
