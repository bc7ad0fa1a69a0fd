// The user of the process at the other end of a connection within this host.
//
// Threads: any. Blocking: for a few system calls. Lifetime: plain values. Errors: kUnavailable if
// the kernel does not know the user, because the peer is on another host or has closed its socket;
// kInvalidArgument for a user other than root and the user of this process. Source: SO_PEERCRED for
// unix sockets; for TCP the owner of the peer's socket, by sock_diag(7).
#pragma once

#include <cstdint>

#include "cadre/core/base/error.h"

namespace cadre::os {

Result<uint32_t> peer_user_of(int fd);

// Returns an error unless the user is root or the user of this process.
Status require_own_user(const Result<uint32_t>& user);

}  // namespace cadre::os
