// The errors of Transport::wait(), with the same text in every transport.
//
// Threads: any. Blocking: never.
#pragma once

#include <span>

#include "cadre/core/base/error.h"
#include "cadre/core/transport/transport.h"

namespace cadre {

// Returns kTimeout: "rank 0: the deadline passed while waiting to send to rank 1; ...".
Error timeout_error(Rank rank, std::span<const ChannelInterest> interests);
// Returns kAborted: the group's Interrupt was raised during the wait.
Error interrupted_error(Rank rank, std::span<const ChannelInterest> interests);

}  // namespace cadre
