// Opens connections to ranks whose addresses are known.
//
// Threads: any. Blocking: until the deadline; one attempt to connect takes at most
// kConnectPeerTimeout. Lifetime: borrows its arguments for the call. Errors: kPeerLost if no
// process listens at the address or no route leads to it, and kTimeout if the peer did not answer
// in time; both name both ends, the interface and the errno, and have the peer as culprit.
// kUnavailable with ErrorDetails::is_own_limit and this rank as culprit if this process can open no
// more sockets. kUnavailable or kInvalidArgument if one end rejected the other in the handshake.
// Control connections between ranks of one host are unix sockets, which can pass descriptors. All
// other connections are TCP, and so is one whose unix socket cannot be opened.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/fabric/bootstrap/handshake.h"
#include "cadre/core/fabric/bootstrap/layout.h"
#include "cadre/core/os/system.h"
#include "cadre/core/wire/control.h"

namespace cadre {

// The pause before this rank dials again a peer that has dropped its connection.
inline constexpr Duration kRedialPause = std::chrono::milliseconds(100);

// Returns text such as "rank 3 (node1, pid 812)".
std::string describe_rank(const wire::RankAddress& rank_address, int rank);

// One of the two ranks between which a connection is opened. The address is borrowed.
struct End {
  const wire::RankAddress& rank_address;
  int rank = 0;
};

struct Route {
  End from;  // this rank, which dials
  End to;
  // The host part of the address at which this rank reaches the store; empty if unknown.
  std::string_view store_host = {};
  wire::LinkPurpose purpose = wire::LinkPurpose::kControl;
};

// Returns the TCP address at which this rank can reach the other end of the route.
Result<os::Address> tcp_address_of(const Route& route);
// Returns the error for a failed attempt to connect: it names both ends and what to check.
Error unreachable(const Route& route, const os::Address& address, const Error& error);
// Opens a connection and performs no handshake.
Result<std::unique_ptr<os::Socket>> open_socket(os::System& system, const Route& route,
                                                Deadline deadline);

struct DialOptions {
  LinkIdentity identity;
  std::string store_host;
};

// Opens a connection and performs its handshake. A busy peer may drop a connection whose handshake
// takes long (callers.h). Then this rank dials again.
Result<std::unique_ptr<os::Socket>> dial(os::System& system, const Layout& layout,
                                         const DialOptions& options, int peer,
                                         wire::LinkPurpose purpose, Deadline deadline);

}  // namespace cadre
