// One segment of shared memory for the ranks of a host. The lowest rank of the host, its leader,
// creates the segment and passes its descriptor to the others over their connections to the leader.
//
// Threads: one. Blocking: until the deadline of the Links. Lifetime: the segment lives as long as
// its mappings. Errors: a timeout names the rank for which this rank waited; the leader also
// returns errors of the System. That ranks cannot share memory is no error.
// Ranks with equal boot ids may still be in different containers and unable to share memory. So
// each rank writes a stamp into the segment, and the ranks use the segment only if every rank could
// map it and the leader has read all stamps. The stamps are in the first page, which is reserved;
// all other bytes are zero.
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
  std::shared_ptr<os::SharedMemory> memory;  // null if the ranks share no memory
  std::string obstacle;                      // the reason why memory is null
};

struct HostSegmentOptions {
  bool may_share = true;
  // Returns the size of the segment, which is at least kStampBytes.
  std::function<size_t(int num_ranks)> num_bytes;
};

// Shares one segment between the ranks of this rank's host, which all make this call. REQUIRES:
// each of them has a connection to the leader.
Result<HostSegment> share_host_segment(os::System& system, Links& links, const Layout& layout,
                                       int rank, const HostSegmentOptions& options);

}  // namespace cadre
