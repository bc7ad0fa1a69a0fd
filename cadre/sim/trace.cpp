#include "cadre/sim/trace.h"

namespace cadre::sim {

void Trace::add(TimePoint at, std::string_view who, std::string_view what) {
  constexpr uint64_t kFnvPrime = 0x100000001b3ULL;
  std::string line = std::to_string(at.ns);
  line.append(" ").append(who).append(": ").append(what);
  for (const char c : line) hash_ = (hash_ ^ static_cast<unsigned char>(c)) * kFnvPrime;
  lines_.push_back(std::move(line));
}

}  // namespace cadre::sim
