#include "cadre/core/os/io/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/fd.h"

namespace cadre::os {
namespace {

bool is_numeric(const std::string& host) {
  in6_addr any{};
  return ::inet_pton(AF_INET, host.c_str(), &any) == 1 ||
         ::inet_pton(AF_INET6, host.c_str(), &any) == 1;
}

bool is_loopback(const SocketAddress& address) {
  const std::string host = to_address(address).host;
  return host == "::1" || host.starts_with("127.") || host.starts_with("::ffff:127.");
}

bool is_link_local(const SocketAddress& address) {
  const std::string host = to_address(address).host;
  return host.starts_with("fe80:") || host.starts_with("169.254.");
}

void visit_interfaces(const std::function<void(const ifaddrs&, const SocketAddress&)>& visit) {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    SocketAddress address;
    address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.storage, entry->ifa_addr, address.size);
    visit(*entry, address);
  }
}

void set_port(SocketAddress& address, uint16_t port) {
  // IPv4 and IPv6 addresses store the port in network byte order.
  if (address.family() == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&address.storage)->sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_port = htons(port);
  }
}

InterfaceAddress describe(const std::string& interface, const SocketAddress& address) {
  return {.interface = interface,
          .host = to_address(address).host,
          .is_loopback = is_loopback(address),
          .is_link_local = is_link_local(address)};
}

}  // namespace

Result<std::vector<SocketAddress>> listening_addresses(const Address& address) {
  Result<std::vector<SocketAddress>> resolved = resolve(address);
  if (!resolved.ok() || address.kind != Address::Kind::kTcp || is_numeric(address.host)) {
    return resolved;
  }
  std::vector<SocketAddress> addresses = std::move(resolved).value();
  const bool is_all_loopback = std::all_of(addresses.begin(), addresses.end(), is_loopback);
  if (is_all_loopback && address.host != "localhost") {
    visit_interfaces([&](const ifaddrs&, const SocketAddress& own) {
      if (is_loopback(own) || is_link_local(own)) return;
      addresses.push_back(own);
      set_port(addresses.back(), address.port);
    });
  }
  // /etc/hosts may name one address twice.
  std::vector<SocketAddress> unique;
  for (const SocketAddress& next : addresses) {
    const auto is_same = [&](const SocketAddress& other) {
      return to_address(other) == to_address(next);
    };
    if (std::none_of(unique.begin(), unique.end(), is_same)) unique.push_back(next);
  }
  return unique;
}

std::vector<InterfaceAddress> interface_addresses() {
  std::vector<InterfaceAddress> addresses;
  visit_interfaces([&](const ifaddrs& entry, const SocketAddress& address) {
    addresses.push_back(describe(entry.ifa_name, address));
  });
  return addresses;
}

std::optional<InterfaceAddress> source_towards(const SocketAddress& target) {
  // Connecting a datagram socket asks the routing table and sends nothing.
  const Fd fd(::socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.is_open() || ::connect(fd.get(), target.get(), target.size) != 0) return std::nullopt;
  SocketAddress local;
  local.size = sizeof(local.storage);
  if (::getsockname(fd.get(), local.get(), &local.size) != 0) return InterfaceAddress{};
  InterfaceAddress source = describe("", local);
  for (const InterfaceAddress& own : interface_addresses()) {
    if (own.host == source.host) source.interface = own.interface;
  }
  return source;
}

std::string describe_route_to(const SocketAddress& target) {
  if (target.family() != AF_INET && target.family() != AF_INET6) return "on this host";
  const auto source = source_towards(target);
  if (!source) return "with no interface that leads there";
  if (source->host.empty()) return "from an unknown address";
  return cadre::format("from {} on {}", source->host,
                       source->interface.empty() ? "an unknown interface" : source->interface);
}

}  // namespace cadre::os
