#include "cadre/core/os/io/socket_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
#include <memory>

#include "cadre/core/base/format.h"

namespace cadre::os {
namespace {

using AddrInfoList = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

// AI_NUMERICHOST in `flags` makes the resolver fail for names instead of asking a server.
int lookup(const Address& address, int flags, AddrInfoList& list) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  const int status = ::getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found);
  list.reset(found);
  return status;
}

Result<std::vector<SocketAddress>> resolve_tcp(const Address& address) {
  AddrInfoList list(nullptr, &::freeaddrinfo);
  int status = lookup(address, AI_NUMERICHOST, list);
  if (status == EAI_NONAME) status = lookup(address, 0, list);
  if (status != 0) {
    return Error(ErrorCode::kUnavailable,
                 cadre::format("host name \"{}\" does not resolve: {}; check the spelling, "
                               "/etc/hosts and DNS",
                               address.host, ::gai_strerror(status)));
  }
  std::vector<SocketAddress> result;
  for (const addrinfo* info = list.get(); info != nullptr; info = info->ai_next) {
    if (info->ai_addrlen > sizeof(sockaddr_storage)) continue;
    SocketAddress& next = result.emplace_back();
    std::memcpy(&next.storage, info->ai_addr, info->ai_addrlen);
    next.size = info->ai_addrlen;
  }
  return result;
}

Result<std::vector<SocketAddress>> resolve_unix(const Address& address) {
  sockaddr_un un{};
  un.sun_family = AF_UNIX;
  // An abstract name is a zero byte, then the name, without a terminator.
  if (address.host.empty() || address.host.size() > sizeof(un.sun_path) - 1) {
    return Error(ErrorCode::kInvalidArgument,
                 cadre::format("unix socket name \"{}\" has {} bytes; expected 1 to {}",
                               address.host, address.host.size(), sizeof(un.sun_path) - 1));
  }
  std::memcpy(un.sun_path + 1, address.host.data(), address.host.size());
  SocketAddress result;
  std::memcpy(&result.storage, &un, sizeof(un));
  result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.host.size());
  return std::vector<SocketAddress>{result};
}

using NameCall = int (*)(int, sockaddr*, socklen_t*);

Address name_of(int fd, NameCall call) {
  SocketAddress address;
  address.size = sizeof(address.storage);
  // The call fails only when the stream has already ended; then the address is unknown.
  if (call(fd, address.get(), &address.size) != 0) return {};
  return to_address(address);
}

}  // namespace

Result<std::vector<SocketAddress>> resolve(const Address& address) {
  return address.kind == Address::Kind::kUnix ? resolve_unix(address) : resolve_tcp(address);
}

Address to_address(const SocketAddress& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.family() == AF_INET) {
    sockaddr_in in{};
    std::memcpy(&in, &address.storage, sizeof(in));
    ::inet_ntop(AF_INET, &in.sin_addr, text, sizeof(text));
    return {Address::Kind::kTcp, text, ntohs(in.sin_port)};
  }
  if (address.family() == AF_INET6) {
    sockaddr_in6 in6{};
    std::memcpy(&in6, &address.storage, sizeof(in6));
    ::inet_ntop(AF_INET6, &in6.sin6_addr, text, sizeof(text));
    return {Address::Kind::kTcp, text, ntohs(in6.sin6_port)};
  }
  constexpr size_t kNameOffset = offsetof(sockaddr_un, sun_path) + 1;
  if (address.size <= kNameOffset) return {Address::Kind::kUnix, "", 0};
  const char* name = reinterpret_cast<const char*>(&address.storage) + kNameOffset;
  return {Address::Kind::kUnix, std::string(name, address.size - kNameOffset), 0};
}

Address local_address_of(int fd) {
  return name_of(fd, [](int number, sockaddr* out, socklen_t* size) {
    return ::getsockname(number, out, size);
  });
}

Address peer_address_of(int fd) {
  return name_of(fd, [](int number, sockaddr* out, socklen_t* size) {
    return ::getpeername(number, out, size);
  });
}

}  // namespace cadre::os
