// One segment of memory for the ranks of a host: its lowest rank, the leader, makes it and hands it
// to the others over their connections to it.
//
// Threads: one. Blocking: until the deadline of the Links. Lifetime: the segment lives as long as
// its mappings. Errors: Results that name the rank that was waited for, and those of the System on
// the leader; ranks that cannot share memory are no error.
// Equal boot ids are only a hint (containers): what decides is whether every rank could map the
// segment and the leader saw what each wrote there. The stamps are in the first page, which is
// reserved and not zero any more; all other bytes are zero.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/fabric/bootstrap/layout.h"
#include "cadre/core/fabric/bootstrap/links.h"
#include "cadre/core/os/system.h"

namespace cadre {

// The first page of a segment: a stamp of 8 bytes for each rank.
inline constexpr size_t kStampBytes = 4096;
inline constexpr int kMaxRanksOfSegment = static_cast<int>(kStampBytes / sizeof(uint64_t));

struct HostSegment {
  std::shared_ptr<os::SharedMemory> memory;  // null where the ranks share none
  std::string obstacle;                      // why not
};

struct HostSegmentOptions {
  bool may_share = true;
  std::function<size_t(int num_ranks)> num_bytes;  // size of the segment; at least kStampBytes
};

// Collective over the ranks of this rank's host. REQUIRES: each has a connection to the leader.
Result<HostSegment> share_host_segment(os::System& system, Links& links, const Layout& layout,
                                       int rank, const HostSegmentOptions& options);

}  // namespace cadre
