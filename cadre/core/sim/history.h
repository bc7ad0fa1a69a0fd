// The events of a simulation, one line each, and a hash by which two runs are compared.
//
// Threads: the one that the simulator runs. Blocking: never.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/fnv1a.h"

namespace cadre::sim {

class History {
 public:
  explicit History(bool is_kept) : is_kept_(is_kept) {}

  // Adds a line such as "1500 rank0/main: poll": nanoseconds of virtual time, thread, event.
  void add(TimePoint at, std::string_view who, std::string_view what);

  const std::vector<std::string>& lines() const { return lines_; }
  // Returns FNV-1a over all lines.
  uint64_t hash() const { return hash_.value(); }

 private:
  const bool is_kept_;
  std::vector<std::string> lines_;
  Fnv1a hash_;
};

}  // namespace cadre::sim
