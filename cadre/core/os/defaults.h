// Every default deadline of the library, with the operations it covers.
#pragma once

#include <chrono>

#include "cadre/core/base/deadline.h"

namespace cadre {

// The limit of each collective, send and recv without a deadline of its own. It counts from the
// operation's start, not from its issue.
inline constexpr Duration kDefaultOperationTimeout = std::chrono::seconds(60);
// The limit of the rendezvous and of the connection of all ranks: init_process_group, connect,
// rejoin.
inline constexpr Duration kDefaultConnectTimeout = std::chrono::seconds(120);
// The limit of one connection between two ranks, within kDefaultConnectTimeout or within the first
// operation that needs the connection. Two ranks that cannot reach each other thus report it,
// instead of waiting for packets that a firewall drops.
inline constexpr Duration kConnectPeerTimeout = std::chrono::seconds(5);
// The limit of Communicator::close(), which first waits for pending operations and then leaves the
// group.
inline constexpr Duration kDefaultCloseTimeout = std::chrono::seconds(10);
// A heartbeat is sent on a control connection to another host if nothing was sent on it for this
// time.
inline constexpr Duration kStatusInterval = std::chrono::milliseconds(250);
// A remote peer that sends nothing for this time counts as lost although its connection is open:
// its host has probably crashed. The limit is longer than an operation's timeout, because a process
// that is stopped or gets no processor time is silent too, and may continue.
inline constexpr Duration kDefaultSilenceLimit = std::chrono::seconds(120);

// The limit for saving and loading a sharded snapshot. It applies to each point at which ranks wait
// until the slowest of them has written, or has checked, its files.
inline constexpr Duration kDefaultSnapshotTimeout = std::chrono::seconds(600);

// The limit of what one rank does while the others wait for it in on_main_rank() and
// main_rank_first().
inline constexpr Duration kDefaultMainRankTimeout = std::chrono::minutes(30);

}  // namespace cadre
