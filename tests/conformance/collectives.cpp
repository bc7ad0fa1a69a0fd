#include "collectives.h"

#include <algorithm>
#include <array>
#include <chrono>

namespace cadre::conformance {
namespace {

using Buffer = std::vector<std::byte>;

testing::CollectiveCall call_of(const Case& c, Rank rank, int world_size) {
  const OpKind kind = collectives()[c.collective].kind;
  return {.kind = kind,
          .dtype = c.dtype,
          .count = c.count,
          .root = c.root,
          .reduction = c.op == ReduceOp::kPremulSum ? Reduction::premul_sum(factor_of(rank)) : c.op,
          .world_size = world_size,
          .parts = [kind, count = c.count](int from, int to) -> uint64_t {
            // The counts differ between pairs of ranks, each count occurs, and some parts are
            // empty.
            if (kind == OpKind::kAllToAllV)
              return count + static_cast<uint64_t>((from + 2 * to) % 3);
            return from % 4 == 3 ? 0 : count + static_cast<uint64_t>(2 * from % 3);
          }};
}

int64_t ticks_now() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

// Tests that no rank leaves a barrier before the last rank has entered it. In each turn another
// rank enters later than the others; the times are comparable, because all ranks are on one host.
// The result has a 1 for each turn that was correct.
Buffer run_barrier(const Tested& tested, const Case&, const Brought&) {
  Communicator& group = tested.group;
  constexpr auto kDelay = std::chrono::microseconds(300);
  const auto world_size = static_cast<size_t>(group.world_size());
  Buffer in_order;
  for (size_t late = 0; late < world_size; ++late) {
    group.barrier();
    const auto begin = std::chrono::steady_clock::now();
    while (static_cast<size_t>(group.rank().value) == late &&
           std::chrono::steady_clock::now() - begin < kDelay) {
    }
    std::array<int64_t, 2> own = {ticks_now(), 0};
    group.barrier();
    own[1] = ticks_now();
    std::vector<std::array<int64_t, 2>> all(world_size);
    group.all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)),
                     DType::kInt64);
    int64_t last_entry = all[0][0];
    int64_t first_exit = all[0][1];
    for (const auto& [entry, exit] : all) {
      last_entry = std::max(last_entry, entry);
      first_exit = std::min(first_exit, exit);
    }
    in_order.push_back(std::byte{first_exit >= last_entry});
  }
  return in_order;
}

Buffer expected_of_barrier(const Case&, Rank, int world_size) {
  return Buffer(static_cast<size_t>(world_size), std::byte{1});
}

// Each rank sends to the next rank of a ring and receives from the previous one.
Buffer run_send_recv(const Tested& tested, const Case& c, const Brought& brought) {
  Communicator& group = tested.group;
  Buffer in = brought(c.count);
  const int world_size = group.world_size();
  if (world_size == 1) return in;
  constexpr int kTag = 5;
  const Work sent = group.send_async(in, c.dtype, (group.rank() + 1) % world_size, kTag);
  Buffer out(in.size());
  group.recv(out, c.dtype, (group.rank() + world_size - 1) % world_size, kTag);
  sent.wait();
  return out;
}

Buffer expected_of_send_recv(const Case& c, Rank rank, int world_size) {
  return numbers(c, (rank + world_size - 1) % world_size, world_size, 0, c.count);
}

constexpr std::array<CollectiveEntry, 13> kCollectives = {{
    {.name = "broadcast", .kind = OpKind::kBroadcast, .has_root = true, .is_same_everywhere = true},
    {.name = "all_reduce", .kind = OpKind::kAllReduce, .has_op = true, .is_same_everywhere = true},
    {.name = "all_gather",
     .kind = OpKind::kAllGather,
     .takes_count_per_rank = true,
     .is_same_everywhere = true},
    {.name = "all_gather_v",
     .kind = OpKind::kAllGatherV,
     .takes_count_per_rank = true,
     .is_same_everywhere = true},
    {.name = "reduce_scatter",
     .kind = OpKind::kReduceScatter,
     .has_op = true,
     .takes_count_per_rank = true},
    {.name = "reduce_scatter_v",
     .kind = OpKind::kReduceScatterV,
     .has_op = true,
     .takes_count_per_rank = true},
    {.name = "reduce", .kind = OpKind::kReduce, .has_op = true, .has_root = true},
    {.name = "gather", .kind = OpKind::kGather, .has_root = true, .takes_count_per_rank = true},
    {.name = "scatter", .kind = OpKind::kScatter, .has_root = true, .takes_count_per_rank = true},
    {.name = "all_to_all", .kind = OpKind::kAllToAll, .takes_count_per_rank = true},
    {.name = "all_to_all_v", .kind = OpKind::kAllToAllV, .takes_count_per_rank = true},
    {.name = "barrier", .has_data = false, .run = run_barrier, .expected = expected_of_barrier},
    {.name = "send and recv", .run = run_send_recv, .expected = expected_of_send_recv},
}};

}  // namespace

void run_on_cpu(Communicator& group, const testing::CollectiveCall& call, ConstBytes in,
                Bytes out) {
  group.run(call.collective(group.rank(), in, out));
}

std::vector<std::byte> run_collective(const Tested& tested, const Case& c, const Brought& brought) {
  const Rank rank = tested.group.rank();
  const auto call = call_of(c, rank, tested.group.world_size());
  const Buffer in = brought(call.num_input(rank));
  Buffer out = in;
  if (call.kind != OpKind::kBroadcast) {
    out.assign(call.num_output(rank) * size_of(c.dtype), std::byte{});
  }
  tested.run_call(tested.group, call, in, out);
  return out;
}

std::vector<std::byte> expected_of_collective(const Case& c, Rank rank, int world_size) {
  Buffer all;
  for (const auto& [from, begin, count] : call_of(c, rank, world_size).output(rank)) {
    const Buffer piece =
        from ? numbers(c, *from, world_size, begin, count) : reduced(c, world_size, begin, count);
    all.insert(all.end(), piece.begin(), piece.end());
  }
  return all;
}

std::span<const CollectiveEntry> collectives() {
  return kCollectives;
}

}  // namespace cadre::conformance
