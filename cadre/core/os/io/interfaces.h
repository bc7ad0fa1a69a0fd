// The network interfaces of this host: the addresses at which it is reached, and the one that leads
// to a peer.
//
// Threads: any. Blocking: for a name, like resolve() in socket_address.h; otherwise never.
// Errors: those of resolve().
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/io/socket_address.h"

namespace cadre::os {

// Returns the addresses at which to listen for `address`. For a numeric or unix address that is the
// address itself; for a name, all addresses to which it resolves. A name of this host that leads
// only to loopback, as in Debian's /etc/hosts (127.0.1.1), means something else to every other
// host: then the addresses of this host's interfaces are added. "localhost" is loopback. The result
// never has the wildcard address.
Result<std::vector<SocketAddress>> listening_addresses(const Address& address);

// An address of a network interface that is up.
struct InterfaceAddress {
  std::string interface;  // "eth0"; empty if it is unknown
  std::string host;       // the numeric address
  bool is_loopback = false;
  bool is_link_local = false;

  friend bool operator==(const InterfaceAddress&, const InterfaceAddress&) = default;
};

// Returns the IPv4 and IPv6 addresses of all interfaces that are up.
std::vector<InterfaceAddress> interface_addresses();

// Returns the address from which this host's packets to the TCP address `target` leave; nullopt if
// there is no route. Sends nothing.
std::optional<InterfaceAddress> source_towards(const SocketAddress& target);

// Returns a text for messages that says from where this host's packets to `target` leave, "from
// 10.0.0.2 on eth0", or why they cannot if there is no route.
std::string describe_route_to(const SocketAddress& target);

}  // namespace cadre::os
