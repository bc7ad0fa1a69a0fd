// Converts between Address and the kernel's sockaddr.
//
// Threads: any. Errors: kInvalidArgument for a name that cannot be an address, kUnavailable for a
// host name that does not resolve at present.
// Blocking: resolve() of a name asks the system's resolver, which has its own time limits
// (/etc/resolv.conf); numeric addresses never block.
#pragma once

#include <sys/socket.h>

#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/os/socket.h"

namespace cadre::os {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

// Returns all addresses of a host name in the resolver's order; one for a numeric or unix address.
Result<std::vector<SocketAddress>> resolve(const Address& address);

// Returns the numeric address of a TCP socket, or the name of a unix socket, which is empty at the
// connecting end.
Address to_address(const SocketAddress& address);
Address local_address_of(int fd);
Address peer_address_of(int fd);

}  // namespace cadre::os
