#include "cadre/core/os/socket.h"

#include <charconv>

#include "cadre/core/base/format.h"

namespace cadre::os {
namespace {

constexpr std::string_view kTcpPrefix = "tcp:";
constexpr std::string_view kUnixPrefix = "unix:@";
// sun_path has 108 bytes and an abstract name begins with a zero byte.
constexpr size_t kMaxUnixName = 107;

Error malformed(std::string_view text, std::string_view reason) {
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("address \"{}\": {}; expected tcp:HOST:PORT, tcp:[IPV6]:PORT or "
                             "unix:@NAME",
                             text, reason));
}

Result<Address> parse_tcp(std::string_view text, std::string_view rest) {
  const size_t colon = rest.rfind(':');
  if (colon == std::string_view::npos) return malformed(text, "it has no port");
  std::string_view host = rest.substr(0, colon);
  const std::string_view port = rest.substr(colon + 1);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return malformed(text, "an IPv6 address needs brackets");
  }
  if (host.empty()) return malformed(text, "the host is empty");
  Address address{Address::Kind::kTcp, std::string(host), 0};
  const auto [end, status] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (status != std::errc() || end != port.data() + port.size()) {
    return malformed(text, "the port is not a number from 0 to 65535");
  }
  return address;
}

// Moves the parts one after the other. An error after the first bytes is not returned: the call
// returns the number of bytes moved, and the next call reports the error.
template <typename Part, typename Move>
Result<size_t> move_parts(std::span<const Part> parts, Move move) {
  size_t total = 0;
  for (const Part& part : parts) {
    if (part.empty()) continue;
    const Result<size_t> moved = move(part);
    if (!moved.ok()) return total > 0 ? Result<size_t>(total) : moved;
    total += *moved;
    if (*moved < part.size()) break;
  }
  return total;
}

}  // namespace

Result<size_t> Socket::try_send_parts(std::span<const ConstBytes> parts) {
  return move_parts(parts, [this](ConstBytes part) { return try_send(part); });
}

Result<size_t> Socket::try_recv_parts(std::span<const Bytes> parts) {
  return move_parts(parts, [this](Bytes part) { return try_recv(part); });
}

std::string Address::to_string() const {
  if (kind == Kind::kUnix) return std::string(kUnixPrefix) + host;
  return std::string(kTcpPrefix) + host_and_port();
}

std::string Address::host_and_port() const {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return is_ipv6 ? cadre::format("[{}]:{}", host, port) : cadre::format("{}:{}", host, port);
}

Result<Address> Address::parse(std::string_view text) {
  if (text.starts_with(kTcpPrefix)) return parse_tcp(text, text.substr(kTcpPrefix.size()));
  if (!text.starts_with(kUnixPrefix)) return malformed(text, "the kind is unknown");
  const std::string_view name = text.substr(kUnixPrefix.size());
  if (name.empty() || name.size() > kMaxUnixName) {
    return malformed(text, "the name must have 1 to 107 bytes");
  }
  return Address{Address::Kind::kUnix, std::string(name), 0};
}

}  // namespace cadre::os
