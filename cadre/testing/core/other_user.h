// Runs a process of another user of this machine, which connects to a server under test.
//
// Threads: any. Blocking: during the connection, 5 s at most. Lifetime: the process has ended when
// the call returns. Errors: throws Error(kInternal) if the process cannot be started.
#pragma once

#include <string>

#include "cadre/core/os/socket.h"
#include "cadre/core/os/system.h"

namespace cadre::testing {

inline constexpr int kOtherUser = 65534;  // the user "nobody"

// Returns why this process cannot become another user; an empty text if it can.
std::string obstacle_to_other_user();

// Connects to the numeric address `address` as the user kOtherUser, and sends `bytes`. Returns the
// bytes received until the server closes the connection. If the server does not close it within 2
// s, returns "(kept)" followed by the received bytes.
std::string talk_as_other_user(const os::Address& address, const std::string& bytes);

}  // namespace cadre::testing
