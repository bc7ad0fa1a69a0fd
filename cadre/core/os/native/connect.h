// Opens listening sockets, and connections with a deadline.
//
// Threads: any. Blocking: connect_socket until its Deadline; see socket_address.h for host names.
// Errors: kUnavailable when no process listens or no route leads to the address at present,
// kTimeout at the deadline, both with the remote address, the local address, the interface and the
// errno; kInvalidArgument for an address that cannot be used.
#pragma once

#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/socket.h"

namespace cadre::os {

// Opens one listener for each address of listening_addresses(), all with one port. Returns at least
// one listener.
Result<std::vector<Fd>> open_listeners(const Address& address);
// Connects to the first address of a host name that accepts the connection. Each address gets an
// equal part of the time that is left.
Result<Fd> connect_socket(const Address& address, Deadline deadline);

}  // namespace cadre::os
