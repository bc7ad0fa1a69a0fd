// Every default deadline of the library, with the operations it covers.
#pragma once

#include <chrono>

#include "cadre/core/base/deadline.h"

namespace cadre {

// The timeout of each collective, send and recv for which the caller gives none. It counts from the
// time at which the operation starts to run, not from the call that queues it.
inline constexpr Duration kDefaultOperationTimeout = std::chrono::seconds(60);
// The timeout of init_process_group, connect and rejoin, which covers the rendezvous and the
// connections between all ranks.
inline constexpr Duration kDefaultConnectTimeout = std::chrono::seconds(120);
// The timeout for opening one connection between two ranks, as a part of kDefaultConnectTimeout or
// of the timeout of the first operation that needs the connection. Two ranks that cannot reach each
// other thus report it, instead of waiting for packets that a firewall drops.
inline constexpr Duration kConnectPeerTimeout = std::chrono::seconds(5);
// The timeout of Communicator::close(), which first waits for pending operations and then leaves
// the group.
inline constexpr Duration kDefaultCloseTimeout = std::chrono::seconds(10);
// A heartbeat is sent on a control connection to another host if nothing was sent on it for this
// time.
inline constexpr Duration kStatusInterval = std::chrono::milliseconds(250);
// A remote peer that sends nothing for this time counts as lost although its connection is open:
// its host has probably crashed. The limit is longer than an operation's timeout, because a process
// that is stopped or gets no processor time is silent too, and may continue.
inline constexpr Duration kDefaultSilenceLimit = std::chrono::seconds(120);

// The timeout for saving and loading a sharded snapshot (a checkpoint). It applies to each point at
// which ranks wait until the slowest of them has written, or has checked, its files.
inline constexpr Duration kDefaultSnapshotTimeout = std::chrono::seconds(600);

// The time that the main rank may take in on_main_rank() and main_rank_first(), while the other
// ranks wait for it.
inline constexpr Duration kDefaultMainRankTimeout = std::chrono::minutes(30);

}  // namespace cadre
