#include "cadre/core/os/proc/pending_signal.h"

#include <time.h>

#include "cadre/core/os/proc/signals.h"

namespace cadre::os {

PendingSignal::PendingSignal(std::span<const int> signals) : watched_(signals_to_take(signals)) {
  ::pthread_sigmask(SIG_BLOCK, &watched_, &previous_mask_);
}

PendingSignal::~PendingSignal() {
  has_arrived();  // a signal left pending would be delivered when the mask is restored
  ::pthread_sigmask(SIG_SETMASK, &previous_mask_, nullptr);
}

bool PendingSignal::has_arrived() {
  const timespec at_once = {};
  // Each call takes one pending instance, so that a repeated signal is not left behind.
  while (::sigtimedwait(&watched_, nullptr, &at_once) > 0) has_arrived_ = true;
  return has_arrived_;
}

}  // namespace cadre::os
