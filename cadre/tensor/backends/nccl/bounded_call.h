// Runs a call of NCCL that may never return. ncclCommAbort() and ncclCommDestroy() join a thread of
// NCCL, which may wait for a peer.
//
// Threads: any. Blocking: until the call has returned, kMaxCallTime at most. Lifetime: a call that
// has not returned by then goes on in its thread, "cadre-nccl-end", until the process ends. So it
// owns what it uses. Errors: none.
#pragma once

#include <chrono>
#include <functional>

#include "cadre/core/base/deadline.h"

namespace cadre::nccl {

inline constexpr Duration kMaxCallTime = std::chrono::seconds(2);

// Runs the call in a thread of its own. Returns false if it has not returned in time, or if no
// thread could be started for it.
bool returns_in_time(std::function<void()> call);

}  // namespace cadre::nccl
