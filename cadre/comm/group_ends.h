// With which collective each rank left a group, and whether the ranks agree on it.
//
// A small broadcast, reduce, gather or scatter ends on a rank that only sends before any other rank
// has looked at it. If the ranks called different ones and nothing follows in the group, no frame
// tells; so the ranks compare what they called last when they leave.
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

  // This rank or another one left in good order; `last` is what it called last.
  void note_left(const Call& last);
  // A rank failed or was lost: it will not say what it called.
  void note_gone(int rank);

  // This rank has left, and another one may still say what it called.
  bool is_open() const;
  // This rank's last call and a different one of the lowest rank that has one. Once only.
  std::optional<Mismatch> take_mismatch();

 private:
  struct End {
    std::optional<Call> last;
    bool is_gone = false;
  };
  const size_t self_;
  std::vector<End> ends_;  // by rank
  bool is_told_ = false;
};

}  // namespace cadre
