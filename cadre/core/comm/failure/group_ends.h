// Compares the last collective that each rank of a group called before it left.
//
// A rank that only sends completes a small broadcast, reduce, gather or scatter before any peer has
// read what it sent. If another rank called a different collective and no operation of the group
// follows, the engines cannot detect the mismatch. So the ranks publish their last call when they
// leave, and compare.
//
// Threads: one at a time; the Monitor guards this object with its mutex. Blocking: never. Errors:
// none.
#pragma once

#include <optional>
#include <vector>

#include "cadre/core/comm/failure/diagnosis.h"

namespace cadre {

class GroupEnds {
 public:
  GroupEnds(int world_size, Rank self);

  // Called when a rank, this one or a peer, has left in good order; `last` is its last collective.
  void note_left(const Call& last);
  // Called when the group has failed: then ranks that have not left yet will not publish their last
  // collective.
  void note_failed() { has_failed_ = true; }

  // Returns whether this rank has left and a peer may still publish its last collective.
  bool is_open() const;
  // Returns the last collective of this rank and the first known one of a peer that differs.
  // Returns nullopt if there is none, or if it was returned before.
  std::optional<Mismatch> take_mismatch();

 private:
  void compare(const Call& other);

  const size_t self_;
  std::vector<std::optional<Call>> last_;  // last_[r] is the last call of rank r
  size_t num_left_ = 0;
  bool has_failed_ = false;
  std::optional<Mismatch> mismatch_;
  bool is_taken_ = false;
};

}  // namespace cadre
