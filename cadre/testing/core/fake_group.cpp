#include "cadre/testing/core/fake_group.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "cadre/core/collective/backend.h"
#include "cadre/core/comm/group_destruction.h"
#include "cadre/core/comm/groups/lone_group.h"
#include "cadre/core/os/system.h"

namespace cadre::testing {
namespace {

// Copies as much of `from` as fits into `out`, and fills the rest of `out` with zeros. `from` and
// `out` may be the same memory.
void fill(Bytes out, ConstBytes from) {
  const size_t size = std::min(out.size(), from.size());
  if (size > 0) std::memmove(out.data(), from.data(), size);
  std::ranges::fill(out.subspan(size), std::byte{0});
}

// Returns a rank's part of `whole`. `counts` has the number of elements in each rank's part; empty
// if all parts have the same size.
template <typename Span>
Span part_of(Span whole, const std::vector<uint64_t>& counts, DType dtype, size_t rank,
             size_t world_size) {
  if (counts.empty()) {
    const size_t size = whole.size() / world_size;
    return whole.subspan(rank * size, size);
  }
  size_t begin = 0;
  for (size_t i = 0; i < rank; ++i) begin += counts[i] * size_of(dtype);
  return whole.subspan(begin, counts[rank] * size_of(dtype));
}

class Placeholders final : public Backend {
 public:
  Placeholders(Rank rank, int world_size)
      : rank_(static_cast<size_t>(rank.value)), world_size_(static_cast<size_t>(world_size)) {}

  Capabilities capabilities() const override { return full_capabilities("placeholders"); }
  Completion submit(const OpContext& op, std::span<const Collective> collectives) override {
    return run_in_order(op, collectives, [this](const OpContext&, const Collective& collective) {
      run(collective);
      return Status();
    });
  }

 private:
  void run(const Collective& c) const {
    switch (c.kind) {
      case OpKind::kAllReduce:
      case OpKind::kReduce:
        if (!c.out.empty()) fill(c.out, c.in);
        return;
      case OpKind::kReduceScatter:
      case OpKind::kReduceScatterV:
        fill(c.out, part_of(c.in, c.splits.input, c.dtype, rank_, world_size_));
        return;
      case OpKind::kScatter:
        fill(c.out, c.in.empty() ? ConstBytes()
                                 : part_of(c.in, c.splits.input, c.dtype, rank_, world_size_));
        return;
      case OpKind::kAllGather:
      case OpKind::kAllGatherV:
      case OpKind::kGather:
        gather(c);
        return;
      case OpKind::kAllToAll:
      case OpKind::kAllToAllV:
        for (size_t rank = 0; rank < world_size_; ++rank) {
          fill(part_of(c.out, c.splits.output, c.dtype, rank, world_size_),
               part_of(c.in, c.splits.input, c.dtype, rank, world_size_));
        }
        return;
      case OpKind::kBroadcast:
      case OpKind::kBarrier:
      case OpKind::kSend:
      case OpKind::kRecv:
      case OpKind::kAllocate:
      case OpKind::kWaitSignal:
        return;
    }
  }

  // This rank's input may be its own part of the output (in place). So the input is first copied to
  // its place; the other parts, which do not overlap it, are filled afterwards.
  void gather(const Collective& c) const {
    if (c.out.empty()) return;
    const Bytes own = part_of(c.out, c.splits.output, c.dtype, rank_, world_size_);
    fill(own, c.in);
    for (size_t rank = 0; rank < world_size_; ++rank) {
      if (rank != rank_) fill(part_of(c.out, c.splits.output, c.dtype, rank, world_size_), own);
    }
  }

  const size_t rank_;
  const size_t world_size_;
};

}  // namespace

std::shared_ptr<Communicator> make_fake_communicator(int world_size,
                                                     const FakeGroupOptions& options) {
  struct Owner {
    std::unique_ptr<os::System> system = os::make_native_system();
    std::unique_ptr<Communicator> communicator;
  };
  CommunicatorOptions group;
  group.name = options.name;
  group.log = options.log;
  group.backend = [](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
    return std::unique_ptr<Backend>(std::make_unique<Placeholders>(setup.rank, setup.world_size));
  };
  auto owner = std::make_unique<Owner>();
  owner->communicator = make_lone_group(*owner->system, world_size, group, options.rank);
  return share_group(std::move(owner));
}

}  // namespace cadre::testing
