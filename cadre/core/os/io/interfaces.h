// The network interfaces of this host: on which addresses it is reached, and which one leads to a
// peer.
//
// Threads: any. Blocking: as resolve() in socket_address.h for a name; else never.
// Errors: those of resolve().
#pragma once

#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/io/socket_address.h"

namespace cadre::os {

// Where to listen for `address`: a numeric or unix address there; a name at all that it resolves
// to. A name of this host that leads to loopback alone, as Debian's /etc/hosts has it (127.0.1.1),
// means something else to every other host: then at each address of this host's interfaces as well.
// "localhost" is loopback. Never all interfaces by a wildcard.
Result<std::vector<SocketAddress>> listening_addresses(const Address& address);

// "from 10.0.0.2 on eth0", how this host's packets to `target` leave; why they cannot, when no
// route leads there. For messages.
std::string describe_route_to(const SocketAddress& target);

}  // namespace cadre::os
