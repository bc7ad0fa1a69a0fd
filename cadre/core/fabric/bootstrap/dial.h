// Opens connections to ranks whose addresses are known.
//
// Threads: any; each call stands alone. Blocking: until the deadline; one attempt to connect takes
// kConnectPeerTimeout at most. Lifetime: borrows its arguments for the call.
// Errors: kPeerLost when no process listens there or no route leads there, kTimeout when no answer
// came in time: both name both ends, the interface and the errno, and have the peer as culprit;
// kUnavailable with ErrorDetails::is_own_limit and this rank as culprit when this process can make
// no socket; kUnavailable or kInvalidArgument when one end refused the other.
// Between ranks of one host control connections are unix sockets, which carry descriptors; where
// that fails, and for all else, they are TCP.
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

// Before a call that the other end dropped is made again.
inline constexpr Duration kRedialPause = std::chrono::milliseconds(100);

// "rank 3 (node1, pid 812)"
std::string describe_rank(const wire::RankAddress& rank_address, int rank);

// One end of a connection to come; borrowed.
struct End {
  const wire::RankAddress& rank_address;
  int rank = 0;
};

struct Route {
  End from;  // this rank
  End to;
  std::string_view store_host = {};  // as this rank sees it; empty where unknown
  wire::LinkPurpose purpose = wire::LinkPurpose::kControl;
};

// The address of TCP at which the other end is reached.
Result<os::Address> tcp_address_of(const Route& route);
// What a failed attempt to connect means.
Error unreachable(const Route& route, const os::Address& address, const Error& error);
// A connection without its handshake.
Result<std::unique_ptr<os::Socket>> open_socket(os::System& system, const Route& route,
                                                Deadline deadline);

struct DialOptions {
  LinkIdentity identity;
  std::string store_host;
};

// One more connection, proved. A busy peer may drop a connection whose proof takes long: such a
// call is made again.
Result<std::unique_ptr<os::Socket>> dial(os::System& system, const Layout& layout,
                                         const DialOptions& options, int peer,
                                         wire::LinkPurpose purpose, Deadline deadline);

}  // namespace cadre
