// A process of another user of this machine that talks to a server under test.
//
// Threads: any. Blocking: for the time of a connection, 5 s at most. Lifetime: the process has
// ended when the call returns. Errors: throws Error(kInternal) when the process cannot be made.
#pragma once

#include <string>

#include "cadre/core/os/socket.h"
#include "cadre/core/os/system.h"

namespace cadre::testing {

inline constexpr int kOtherUser = 65534;  // nobody

// Why this process cannot become another user; empty when it can.
std::string obstacle_to_other_user();

// Connects to `address`, numeric, as kOtherUser, sends `bytes`, and returns what comes back until
// the server ends the connection, or "(kept)" and what has come when it does not within 2 s.
std::string talk_as_other_user(const os::Address& address, const std::string& bytes);

}  // namespace cadre::testing
