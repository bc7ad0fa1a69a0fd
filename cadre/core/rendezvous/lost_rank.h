// The list, in the store, of the ranks that died before they were connected. Each rank has a line
// "RANK PID HOST".
//
// Threads: any. Blocking: never. Lifetime: values. Errors: none; other lines are
// ignored.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre {

struct LostRank {
  Rank rank;  // number in the membership that left the will
  int pid = 0;
  std::string host;

  friend bool operator==(const LostRank&, const LostRank&) = default;
};

CADRE_EXPORT std::string write_lost_rank(const LostRank& lost);
CADRE_EXPORT std::vector<LostRank> read_lost_ranks(std::string_view text);

}  // namespace cadre
