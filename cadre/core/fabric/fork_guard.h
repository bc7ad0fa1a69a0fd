// Detects the use of a group in a forked child of the process that connected it. A child made by
// fork() without exec has copies of the group's memory and connections, but none of its threads,
// and must not use either.
//
// Threads: any. Blocking: never. Lifetime: a value that the group, its Works and its buffers copy.
// Errors: check() throws kInvalidArgument in such a child.
#pragma once

#include <memory>
#include <string>

#include "cadre/core/base/types.h"
#include "cadre/core/os/host/fork_mark.h"

namespace cadre {

class ForkGuard {
 public:
  // `mark` was made in this process, whose id is `pid`. All groups of the process share the mark.
  ForkGuard(std::string group, Rank rank, int pid, std::shared_ptr<const os::ForkMark> mark);

  // Returns whether this process is a child made by fork(). Then destructors must neither wait nor
  // communicate.
  bool is_in_child() const { return mark_->is_in_child(); }
  void check() const {
    if (is_in_child()) refuse();
  }
  // Return the group's name and this rank, for messages.
  const std::string& group() const { return group_; }
  Rank rank() const { return rank_; }

 private:
  [[noreturn]] void refuse() const;

  const std::shared_ptr<const os::ForkMark> mark_;
  const std::string group_;
  const Rank rank_;
  const int pid_;
};

}  // namespace cadre
