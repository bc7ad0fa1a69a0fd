// The table of collectives that the conformance program runs: one entry for each. A new collective
// is one entry more, with a function that calls it and one that says what must come out.
//
// Threads: run() from the rank's thread; the rest are pure functions. Blocking: run(). Errors:
// those of the Communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "cadre/core/comm/communicator.h"
#include "cases.h"

namespace cadre::conformance {

// The first `count` elements that this rank brings.
using Brought = std::function<std::vector<std::byte>(uint64_t count)>;

struct Collective {
  std::string_view name;
  bool has_data = true;  // else it has neither dtype nor count
  bool has_op = false;
  bool has_root = false;
  bool takes_count_per_rank = false;  // Case::count is of one rank's part
  // All ranks end with the same bytes, so random floats must give the same bits on all.
  bool is_same_everywhere = false;
  // Calls it once; returns what this rank ends with.
  std::vector<std::byte> (*run)(Communicator& group, const Case& c, const Brought& brought);
  // The same by the formulas of cases.h.
  std::vector<std::byte> (*expected)(const Case& c, Rank rank, int world_size);
};

std::span<const Collective> collectives();

}  // namespace cadre::conformance
