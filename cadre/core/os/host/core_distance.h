// Measures how long a cache line takes from one core to another, between pairs of cores.
//
// Two threads, each bound to one core, take turns in adding 1 to one word; half of a turn's time is
// the distance. Cores of one cluster are near, cores of two sockets or NUMA nodes far.
// Threads: one; starts two threads for each pair and joins them. They spin, so other programs on
// these cores are slowed down meanwhile. Blocking: until the deadline at most.
// Errors: none; a pair is left out if its cores could not be used or were busy until the deadline.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/os/system.h"

namespace cadre::os {

struct CoreDistance {
  int first = 0;
  int second = 0;
  Duration one_way{};  // the median of several measurements
};

// Returns the cores of a mask (HostInfo::core_mask), in ascending order.
std::vector<int> cores_of_mask(std::string_view mask);

// Returns the pairs to measure: all pairs of up to 8 cores; of more cores, each core with those
// that follow it after 1, 2, 4, 8, ... cores, which has near and far pairs. Of many cores only
// every second, third, ... is the first of a pair, so that there are at most 256 pairs. The order
// alternates between all distances, so that a measurement that ends early has some of each.
std::vector<std::pair<int, int>> core_pairs(const std::vector<int>& cores);

std::vector<CoreDistance> measure_core_distances(System& system,
                                                 const std::vector<std::pair<int, int>>& pairs,
                                                 Deadline deadline);

}  // namespace cadre::os
