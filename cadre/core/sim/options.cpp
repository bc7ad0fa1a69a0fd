#include "cadre/core/sim/options.h"

namespace cadre::sim {

std::string_view to_string(FaultKind kind) {
  constexpr std::array<std::string_view, kNumFaultKinds> kNames = {
      "delay", "reorder",   "slow link", "short io", "spurious wake", "cut",
      "kill",  "partition", "heal",      "stop",     "continue"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace cadre::sim
