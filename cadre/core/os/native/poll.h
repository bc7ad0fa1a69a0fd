// poll(2) with deadlines.
//
// Threads: any. Blocking: until the Deadline.
#pragma once

#include <poll.h>

#include <span>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/socket.h"

namespace cadre::os {

// Implements System::poll: sets can_read and can_write. Returns false if none is ready at the
// deadline.
bool poll_items(std::span<PollItem> items, Deadline deadline);

// Waits until `fd` shows one of `events` or an error; returns false at the deadline.
bool poll_one(int fd, short events, Deadline deadline);

}  // namespace cadre::os
