// A TCP port for a server that a test starts later, or stops and starts again.
//
// A port that was chosen by a listener that is closed again is free: until the server listens, the
// kernel may give it to any other socket of the machine. A reservation is a socket that is bound
// with SO_REUSEADDR and never listens. The kernel gives its port to no other socket, connections to
// it are refused, and a server that sets SO_REUSEADDR, as all servers in tests do, can listen at
// it.
//
// Threads: one owner. Lifetime: the port is free again after the destructor. Errors: the
// constructor throws Error(kUnavailable).
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::testing {

class ReservedPort {
 public:
  explicit ReservedPort(const std::string& ipv4_address = "127.0.0.1")
      : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    sockaddr_in address{};
    address.sin_family = AF_INET;
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    const bool is_reserved =
        ::inet_pton(AF_INET, ipv4_address.c_str(), &address.sin_addr) == 1 &&
        ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        ::bind(socket_.get(), generic, size) == 0 &&
        ::getsockname(socket_.get(), generic, &size) == 0;
    if (!is_reserved)
      throw Error(ErrorCode::kUnavailable, format("cannot reserve a port of {}", ipv4_address));
    number_ = ntohs(address.sin_port);
  }

  uint16_t number() const { return number_; }
  std::string text() const { return format("{}", number_); }

 private:
  os::Fd socket_;
  uint16_t number_ = 0;
};

}  // namespace cadre::testing
