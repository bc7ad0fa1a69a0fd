// The process in which a group was connected: a child made by fork() without exec has copies of the
// group's memory and connections, but none of its threads, and must not touch them.
//
// Threads: any. Blocking: never. Lifetime: a value of the group, its Works and its buffers.
// Errors: check() throws kInvalidArgument in such a child.
#pragma once

#include <memory>
#include <string>

#include "cadre/base/types.h"
#include "cadre/os/host/fork_mark.h"

namespace cadre {

class HomeProcess {
 public:
  // `mark` was made in this process, whose id is `pid`; shared by all groups of the process.
  HomeProcess(std::string group, Rank rank, int pid, std::shared_ptr<const os::ForkMark> mark);

  // In a child. What is destroyed there must neither wait nor talk.
  bool is_left() const { return mark_->is_in_child(); }
  void check() const {
    if (is_left()) refuse();
  }

 private:
  [[noreturn]] void refuse() const;

  const std::shared_ptr<const os::ForkMark> mark_;
  const std::string group_;
  const Rank rank_;
  const int pid_;
};

}  // namespace cadre
