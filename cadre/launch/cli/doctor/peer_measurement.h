// Measures the network between two processes: the time of a round trip, the bandwidth in both
// directions, and the difference of their wall clocks. Both call measure_peer().
//
// Rank 0 leads first, then rank 1: the leader sends messages and the other answers. The bytes go
// through send() and recv() of the group, so they take the path of a job's data.
// Threads: one. Blocking: about 2 s, and about 15 s for 1 Mbit/s; until the deadline at most.
// Errors: throws the Error of the group; kCorruption if the peer announces a stream that no Cadre
// would send.
#pragma once

#include "cadre/core/base/deadline.h"
#include "cadre/core/comm/communicator.h"

namespace cadre::cli {

struct PeerMeasurement {
  double round_trip_us_median = 0;
  double round_trip_us_p99 = 0;
  double sent_bytes_per_s = 0;      // this process to the peer
  double received_bytes_per_s = 0;  // the peer to this process
  // The peer's wall clock minus this one, from the fastest round trip: exact to half of it.
  double wall_clock_offset_ms = 0;
};

// REQUIRES: a group of two ranks.
PeerMeasurement measure_peer(Communicator& pair, Deadline deadline);

}  // namespace cadre::cli
