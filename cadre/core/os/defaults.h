// Every default deadline of the library, with the operations it covers.
#pragma once

#include <chrono>

#include "cadre/core/base/deadline.h"

namespace cadre {

// Every collective, send and recv without a deadline of its own; from its start, not its issue.
inline constexpr Duration kDefaultOperationTimeout = std::chrono::seconds(60);
// Rendezvous and the connection of all ranks of a job: init_process_group, connect, rejoin.
inline constexpr Duration kDefaultConnectTimeout = std::chrono::seconds(120);
// One connection between two ranks, within the above or the first operation that needs it: two that
// cannot talk say so, and do not wait for packets that a firewall drops.
inline constexpr Duration kConnectPeerTimeout = std::chrono::seconds(5);
// Communicator::close(): draining what is pending, then leaving in good order.
inline constexpr Duration kDefaultCloseTimeout = std::chrono::seconds(10);
// A control connection to another host that carried nothing for so long carries a heartbeat.
inline constexpr Duration kStatusInterval = std::chrono::milliseconds(250);
// A remote peer that sends nothing for so long is taken for lost, although its connection is open:
// its host has vanished. Longer than an operation's timeout, because a process that is stopped, or
// gets no processor, is silent too and may go on.
inline constexpr Duration kDefaultSilenceLimit = std::chrono::seconds(120);

// Saving and loading a sharded snapshot: each point at which ranks wait until the slowest of them
// has written, or has checked, its files.
inline constexpr Duration kDefaultSnapshotTimeout = std::chrono::seconds(600);

// What one rank does while the others wait for it: on_main_rank(), main_rank_first().
inline constexpr Duration kDefaultMainRankTimeout = std::chrono::minutes(30);

}  // namespace cadre
