#include "cadre/core/fabric/bootstrap/host_segment.h"

#include <algorithm>
#include <atomic>
#include <span>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/os/shared_pages.h"

namespace cadre {
namespace {

std::atomic_ref<uint64_t> stamp_of(const os::SharedMemory& memory, int slot) {
  return std::atomic_ref(reinterpret_cast<uint64_t*>(memory.bytes().data())[slot]);
}

class Sharing {
 public:
  Sharing(os::System& system, Links& links, const Layout& layout, int rank,
          const HostSegmentOptions& options)
      : system_(system),
        links_(links),
        layout_(layout),
        rank_(rank),
        options_(options),
        ranks_(layout.ranks_of(layout.host_of(rank))) {}

  Result<HostSegment> share() {
    if (ranks_.size() == 1) {
      return HostSegment{nullptr, format("rank {} is alone on its host", rank_)};
    }
    const Status status = rank_ == leader() ? lead() : follow();
    if (!status.ok()) return status.error();
    return std::move(segment_);
  }

 private:
  int leader() const { return ranks_.front(); }
  std::span<const int> followers() const { return std::span(ranks_).subspan(1); }
  void give_up(std::string obstacle) { segment_ = {nullptr, std::move(obstacle)}; }

  std::string find_obstacle() const {
    if (!options_.may_share) return format("rank {} may not share memory", rank_);
    if (ranks_.size() > kMaxRanksOfSegment) {
      return format("{} ranks are on one host, and at most {} can share memory", ranks_.size(),
                    kMaxRanksOfSegment);
    }
    for (const int follower : followers()) {
      if (!links_.is_unix(follower)) {
        return format("rank {} cannot reach rank {} over a unix socket", follower, rank_);
      }
    }
    return "";
  }

  Status lead() {
    segment_.obstacle = find_obstacle();
    if (segment_.obstacle.empty()) CADRE_RETURN_IF_ERROR(create());
    for (const int follower : followers()) {
      const std::string what = format("handing shared memory to rank {}", follower);
      CADRE_RETURN_IF_ERROR(links_.send_byte({follower, what}, segment_.memory != nullptr));
      if (segment_.memory == nullptr) continue;
      CADRE_RETURN_IF_ERROR(links_.send_segment({follower, what}, *segment_.memory));
    }
    return segment_.memory == nullptr ? Status() : judge();
  }

  Status create() {
    auto memory = system_.create_segment(
        std::max(kStampBytes, options_.num_bytes(static_cast<int>(ranks_.size()))));
    if (!memory.ok()) return memory.error();
    segment_.memory = std::move(memory).value();
    CADRE_RETURN_IF_ERROR(os::reserve_pages(*segment_.memory, 0, kStampBytes));
    stamp_of(*segment_.memory, 0)
        .store(layout_.rank_address(rank_).probe, std::memory_order_release);
    return {};
  }

  // Runs on the leader: checks the stamps of all ranks and tells each rank whether the segment is
  // used.
  Status judge() {
    std::string obstacle;
    for (const int follower : followers()) {
      const std::string what =
          format("waiting until rank {} has mapped the shared memory", follower);
      const auto is_mapped = links_.receive_byte({follower, what});
      if (!is_mapped.ok()) return is_mapped.error();
      const uint64_t stamp =
          stamp_of(*segment_.memory, layout_.slot_of(follower)).load(std::memory_order_acquire);
      if (!*is_mapped || stamp != layout_.rank_address(follower).probe) {
        obstacle = format("rank {} cannot map memory of rank {}", follower, rank_);
      }
    }
    for (const int follower : followers()) {
      const std::string what = format("telling rank {} whether memory is shared", follower);
      CADRE_RETURN_IF_ERROR(links_.send_byte({follower, what}, obstacle.empty()));
    }
    if (!obstacle.empty()) give_up(std::move(obstacle));
    return {};
  }

  Status follow() {
    const std::string what = format("waiting for the shared memory of rank {}", leader());
    const Links::Exchange exchange{leader(), what};
    const auto is_offered = links_.receive_byte(exchange);
    if (!is_offered.ok()) return is_offered.error();
    if (!*is_offered) {
      give_up(format("rank {} offers no memory to the ranks of its host", leader()));
      return {};
    }
    auto memory = links_.receive_segment(exchange);
    // If mapping fails, no error is returned: the ranks continue without shared memory, and the
    // connection can still be used. A lost connection is an error.
    const bool is_lost = !memory.ok() && (memory.error().code() == ErrorCode::kTimeout ||
                                          memory.error().code() == ErrorCode::kPeerLost);
    if (is_lost) return memory.error();
    const bool is_mapped = options_.may_share && memory.ok() && stamp(**memory);
    CADRE_RETURN_IF_ERROR(links_.send_byte(exchange, is_mapped));
    const auto verdict = links_.receive_byte(exchange);
    if (!verdict.ok()) return verdict.error();
    if (*verdict && is_mapped) {
      segment_.memory = std::move(memory).value();
    } else {
      give_up(format("not all ranks of this host can map memory of rank {}", leader()));
    }
    return {};
  }

  bool stamp(const os::SharedMemory& memory) const {
    if (memory.bytes().size() < kStampBytes) return false;
    stamp_of(memory, layout_.slot_of(rank_))
        .store(layout_.rank_address(rank_).probe, std::memory_order_release);
    return stamp_of(memory, 0).load(std::memory_order_acquire) ==
           layout_.rank_address(leader()).probe;
  }

  os::System& system_;
  Links& links_;
  const Layout& layout_;
  const int rank_;
  const HostSegmentOptions& options_;
  const std::vector<int>& ranks_;
  HostSegment segment_;
};

}  // namespace

Result<HostSegment> share_host_segment(os::System& system, Links& links, const Layout& layout,
                                       int rank, const HostSegmentOptions& options) {
  return Sharing(system, links, layout, rank, options).share();
}

}  // namespace cadre
