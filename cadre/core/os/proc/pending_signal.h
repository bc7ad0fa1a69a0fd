// Signals that are queried instead of interrupting: they are blocked while the object lives. A
// hangup that the process ignores (nohup) stays ignored.
//
// Threads: make it in the main thread before others start, so that they inherit the mask.
// Blocking: never. Lifetime: the destructor restores the mask of its thread, which must be the
// thread that made the object. Errors: none.
#pragma once

#include <signal.h>

#include <span>

#include "cadre/core/base/export.h"

namespace cadre::os {

class CADRE_EXPORT PendingSignal {
 public:
  explicit PendingSignal(std::span<const int> signals);
  ~PendingSignal();
  PendingSignal(const PendingSignal&) = delete;
  PendingSignal& operator=(const PendingSignal&) = delete;

  // Returns whether one of the signals has arrived since this object was made; from then on true.
  bool has_arrived();

 private:
  sigset_t watched_;
  sigset_t previous_mask_;
  bool has_arrived_ = false;
};

}  // namespace cadre::os
