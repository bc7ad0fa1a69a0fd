// Between Address and the kernel's sockaddr.
//
// Threads: any. Errors: kInvalidArgument for a name that cannot be an address, kUnavailable for a
// host name that does not resolve just now.
// Blocking: resolve() of a name asks the system's resolver, which keeps its own time limits
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

// All addresses of a host name in the resolver's order; one for a numeric or unix address.
Result<std::vector<SocketAddress>> resolve(const Address& address);

// The numeric address of TCP, the name of unix (empty for the connecting end).
Address to_address(const SocketAddress& address);
Address local_address_of(int fd);
Address peer_address_of(int fd);

}  // namespace cadre::os
