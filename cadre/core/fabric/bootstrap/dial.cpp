#include "cadre/core/fabric/bootstrap/dial.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/defaults.h"
#include "cadre/core/rendezvous/exchange_addresses.h"

namespace cadre {
namespace {

Error late(const Route& route) {
  return Error(ErrorCode::kTimeout,
               format("the deadline passed in the handshake with {}: look at its log, or give more "
                      "time",
                      describe_rank(route.to.rank_address, route.to.rank)))
      .with_culprit(route.to.rank);
}

Status finish(os::System& system, Handshake& handshake, const Route& route, Deadline deadline) {
  while (true) {
    CADRE_RETURN_IF_ERROR(handshake.step());
    if (handshake.is_done()) return {};
    os::PollItem item = handshake.interest();
    if (!system.poll(std::span(&item, 1), deadline)) return late(route);
  }
}

}  // namespace

std::string describe_rank(const wire::RankAddress& rank_address, int rank) {
  return format("rank {} ({}, pid {})", rank, rank_address.host, rank_address.pid);
}

// A rank may have published several addresses. This function prefers the address whose host is the
// one at which this rank reaches the store, and otherwise returns the first.
Result<os::Address> tcp_address_of(const Route& route) {
  std::string_view rest = route.to.rank_address.tcp_address;
  std::optional<os::Address> first;
  while (!rest.empty()) {
    const size_t blank = std::min(rest.find(' '), rest.size());
    Result<os::Address> address = os::Address::parse(rest.substr(0, blank));
    if (!address.ok()) {
      return address.error().with_context(format("address of rank {}", route.to.rank));
    }
    if (address->host == route.store_host) return address;
    if (!first) first = *address;
    rest.remove_prefix(std::min(blank + 1, rest.size()));
  }
  if (first) return *first;
  return Error(ErrorCode::kCorruption,
               format("rank {} published no address at which it listens", route.to.rank));
}

Error unreachable(const Route& route, const os::Address& address, const Error& error) {
  if (error.details().is_own_limit) {
    return Error(error.code(),
                 format("{} cannot connect to {}: {}",
                        describe_rank(route.from.rank_address, route.from.rank),
                        describe_rank(route.to.rank_address, route.to.rank), error.message()))
        .with_details({.culprit = Rank(route.from.rank), .is_own_limit = true});
  }
  const bool is_gone = error.code() == ErrorCode::kUnavailable;
  const bool is_hidden =
      is_loopback_host(address.host) && route.to.rank_address.host != route.from.rank_address.host;
  return Error(is_gone ? ErrorCode::kPeerLost : error.code(),
               format("{} cannot reach {}: {}. {}",
                      describe_rank(route.from.rank_address, route.from.rank),
                      describe_rank(route.to.rank_address, route.to.rank), error.message(),
                      is_hidden ? "The peer listens on loopback only: set its listen_host to an "
                                  "address that this host reaches"
                                : "Check that the process runs and that no firewall or route is "
                                  "in between"))
      .with_culprit(route.to.rank);
}

Result<std::unique_ptr<os::Socket>> open_socket(os::System& system, const Route& route,
                                                Deadline deadline) {
  const Deadline patience = deadline.earlier(system.deadline_in(kConnectPeerTimeout));
  const bool is_near = route.from.rank_address.boot_id == route.to.rank_address.boot_id;
  if (is_near && route.purpose == wire::LinkPurpose::kControl) {
    const auto address = os::Address::parse(route.to.rank_address.unix_address);
    if (!address.ok()) {
      return address.error().with_context(format("address of rank {}", route.to.rank));
    }
    if (auto socket = system.connect(*address, patience); socket.ok()) return socket;
  }
  const auto address = tcp_address_of(route);
  if (!address.ok()) return address.error();
  auto socket = system.connect(*address, patience);
  if (!socket.ok()) return unreachable(route, *address, socket.error());
  return socket;
}

Result<std::unique_ptr<os::Socket>> dial(os::System& system, const Layout& layout,
                                         const DialOptions& options, int peer,
                                         wire::LinkPurpose purpose, Deadline deadline) {
  const int rank = options.identity.rank;
  const Route route{{layout.rank_address(rank), rank},
                    {layout.rank_address(peer), peer},
                    options.store_host,
                    purpose};
  while (true) {
    auto socket = open_socket(system, route, deadline);
    if (!socket.ok()) return socket.error();
    Handshake handshake =
        Handshake::call(system, std::move(socket).value(), options.identity, peer, purpose);
    const Status status = finish(system, handshake, route, deadline);
    if (status.ok()) return handshake.take();
    if (status.error().code() != ErrorCode::kPeerLost) {
      return status.error()
          .with_context(format("connecting to {}", layout.describe(peer)))
          .with_culprit(peer);
    }
    system.make_waiter()->park(deadline.earlier(system.deadline_in(kRedialPause)));
    if (deadline.has_passed(system.now())) return late(route);
  }
}

}  // namespace cadre
