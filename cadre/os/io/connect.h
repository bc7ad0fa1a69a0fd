// Opens sockets: listening ones, and connections with a deadline.
//
// Threads: any. Blocking: connect_socket until its Deadline; see socket_address.h for host names.
// Errors: kUnavailable when refused or unreachable just now, kTimeout at the deadline,
// kInvalidArgument for an address that cannot be.
#pragma once

#include "cadre/base/deadline.h"
#include "cadre/os/io/fd.h"
#include "cadre/os/socket.h"

namespace cadre::os {

Result<Fd> open_listener(const Address& address);
Result<Fd> connect_socket(const Address& address, Deadline deadline);

}  // namespace cadre::os
