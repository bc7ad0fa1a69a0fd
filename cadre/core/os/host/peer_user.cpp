#include "cadre/core/os/host/peer_user.h"

#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "cadre/core/base/format.h"
#include "cadre/core/os/io/errno_error.h"
#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/io/socket_address.h"

namespace cadre::os {
namespace {

constexpr std::string_view kNotFound =
    "the kernel finds no such connection, or is built without inet_diag";

Error unknown_user(std::string_view reason) {
  return Error(ErrorCode::kUnavailable,
               cadre::format("the user of the process at the other end is unknown: {}", reason));
}

// One end of a TCP connection, as the kernel's tables of sockets store it.
struct TcpEnd {
  int family = AF_UNSPEC;
  std::array<uint32_t, 4> words{};  // the address in network order; for IPv4 it is one word
  uint16_t port = 0;                // the port in network order
};

// An IPv4-mapped IPv6 address belongs to an IPv4 socket in the kernel's tables.
TcpEnd to_end(const sockaddr_storage& storage) {
  TcpEnd end{.family = storage.ss_family};
  if (end.family == AF_INET) {
    sockaddr_in in{};
    std::memcpy(&in, &storage, sizeof(in));
    end.words[0] = in.sin_addr.s_addr;
    end.port = in.sin_port;
  } else if (end.family == AF_INET6) {
    sockaddr_in6 in6{};
    std::memcpy(&in6, &storage, sizeof(in6));
    std::memcpy(end.words.data(), &in6.sin6_addr, sizeof(in6.sin6_addr));
    end.port = in6.sin6_port;
    if (IN6_IS_ADDR_V4MAPPED(&in6.sin6_addr)) {
      end.family = AF_INET;
      end.words = {end.words[3], 0, 0, 0};
    }
  }
  return end;
}

// Both ends of a connection, seen from the peer.
struct PeerView {
  TcpEnd own;     // the end of the peer
  TcpEnd remote;  // the end of this process
};

Result<PeerView> view_of_peer(int fd) {
  SocketAddress peer;
  SocketAddress local;
  peer.size = local.size = sizeof(sockaddr_storage);
  if (::getpeername(fd, peer.get(), &peer.size) != 0 ||
      ::getsockname(fd, local.get(), &local.size) != 0) {
    return unknown_user("the connection has ended");
  }
  const PeerView view{to_end(peer.storage), to_end(local.storage)};
  if (view.own.family != AF_INET && view.own.family != AF_INET6) {
    return unknown_user("it is no TCP connection");
  }
  return view;
}

// `inode` is 0 if the process has closed the socket; the kernel then reports root as the user.
Result<uint32_t> owner(uint32_t user, uint64_t inode) {
  if (inode == 0) return unknown_user("it has closed its socket");
  return user;
}

Result<uint32_t> tcp_peer_user(int fd) {
  const auto view = view_of_peer(fd);
  if (!view.ok()) return view.error();
  struct {
    nlmsghdr header;
    inet_diag_req_v2 request;
  } question{};
  question.header.nlmsg_len = sizeof(question);
  question.header.nlmsg_type = SOCK_DIAG_BY_FAMILY;
  question.header.nlmsg_flags = NLM_F_REQUEST;
  question.request.sdiag_family = static_cast<uint8_t>(view->own.family);
  question.request.sdiag_protocol = IPPROTO_TCP;
  question.request.idiag_states = ~0U;
  inet_diag_sockid& id = question.request.id;
  id.idiag_sport = view->own.port;
  id.idiag_dport = view->remote.port;
  std::memcpy(id.idiag_src, view->own.words.data(), sizeof(id.idiag_src));
  std::memcpy(id.idiag_dst, view->remote.words.data(), sizeof(id.idiag_dst));
  id.idiag_cookie[0] = id.idiag_cookie[1] = INET_DIAG_NOCOOKIE;
  const Fd netlink(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG));
  if (!netlink.is_open() || ::send(netlink.get(), &question, sizeof(question), 0) < 0) {
    return errno_error(ErrorCode::kUnavailable, "ask the kernel by sock_diag", errno);
  }
  // The kernel has queued its answer when send() returns, so recv() need not wait.
  alignas(nlmsghdr) std::array<char, 8192> answer;
  const ssize_t received = ::recv(netlink.get(), answer.data(), answer.size(), MSG_DONTWAIT);
  if (received < static_cast<ssize_t>(NLMSG_LENGTH(sizeof(inet_diag_msg)))) {
    return unknown_user(kNotFound);
  }
  const auto* header = reinterpret_cast<const nlmsghdr*>(answer.data());
  if (header->nlmsg_type != SOCK_DIAG_BY_FAMILY) {
    return unknown_user(kNotFound);
  }
  inet_diag_msg message{};
  std::memcpy(&message, NLMSG_DATA(header), sizeof(message));
  return owner(message.idiag_uid, message.idiag_inode);
}

}  // namespace

Result<uint32_t> peer_user_of(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  int domain = AF_UNSPEC;
  socklen_t domain_size = sizeof(domain);
  ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &domain_size);
  if (domain == AF_UNIX) {
    if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) return peer.uid;
    return errno_error(ErrorCode::kUnavailable, "read the user of a unix socket's peer", errno);
  }
  return tcp_peer_user(fd);
}

Status require_own_user(const Result<uint32_t>& user) {
  if (!user.ok()) return user.error();
  if (*user == 0 || *user == ::geteuid()) return {};
  return Error(ErrorCode::kInvalidArgument,
               cadre::format("the process at the other end belongs to user {}; only user {}, to "
                             "whom the job belongs, and root may connect",
                             *user, ::geteuid()));
}

}  // namespace cadre::os
