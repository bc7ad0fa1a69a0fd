// A signal that is asked for instead of interrupting: blocked while the object lives.
//
// Threads: make it in the main thread before others start, so that they inherit the mask.
// Blocking: never. Lifetime: the destructor restores the mask of the thread that made it, which is
// the one that destroys it. Errors: none.
#pragma once

#include <signal.h>

#include "cadre/base/export.h"

namespace cadre::os {

class CADRE_EXPORT PendingSignal {
 public:
  explicit PendingSignal(int signal_number);
  ~PendingSignal();
  PendingSignal(const PendingSignal&) = delete;
  PendingSignal& operator=(const PendingSignal&) = delete;

  // Whether the signal has arrived since this object was made. Stays true.
  bool has_arrived();

 private:
  sigset_t watched_;
  sigset_t previous_mask_;
  bool has_arrived_ = false;
};

}  // namespace cadre::os
