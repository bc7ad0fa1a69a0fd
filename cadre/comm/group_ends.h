// Which collective each rank of a group called last before it left, and whether the ranks agree.
//
// A rank that only sends ends a small broadcast, reduce, gather or scatter before any other rank
// has looked at it. If the ranks called different ones and no operation follows in the group, no
// frame shows it; so the ranks compare their last calls when they leave.
//
// Threads: one at a time; the monitor guards it. Blocking: never. Errors: none.
#pragma once

#include <optional>
#include <vector>

#include "cadre/comm/diagnosis.h"

namespace cadre {

class GroupEnds {
 public:
  GroupEnds(int world_size, Rank self);

  // This rank or another one left in good order; `last` is its last call.
  void note_left(const Call& last);
  // The group failed: ranks that have not left by now will not say what they called.
  void note_failed() { has_failed_ = true; }

  // This rank has left, and another one may still say what it called.
  bool is_open() const;
  // This rank's last call and a different one of another rank, the first that is known. Once only.
  std::optional<Mismatch> take_mismatch();

 private:
  void compare(const Call& other);

  const size_t self_;
  std::vector<std::optional<Call>> last_;  // by rank
  size_t num_left_ = 0;
  bool has_failed_ = false;
  std::optional<Mismatch> mismatch_;
  bool is_taken_ = false;
};

}  // namespace cadre
