#include "cadre/core/sim/history.h"

namespace cadre::sim {

void History::add(TimePoint at, std::string_view who, std::string_view what) {
  if (!is_kept_) return;
  std::string line = std::to_string(at.ns);
  line.append(" ").append(who).append(": ").append(what);
  hash_.add(line);
  lines_.push_back(std::move(line));
}

}  // namespace cadre::sim
