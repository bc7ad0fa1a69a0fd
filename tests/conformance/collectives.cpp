#include "collectives.h"

#include <array>

namespace cadre::conformance {
namespace {

using Buffer = std::vector<std::byte>;

CollectiveOptions options_of(const Communicator& group, const Case& c) {
  CollectiveOptions options;
  if (c.op == ReduceOp::kPremulSum) options.premul_factor = factor_of(group.rank());
  return options;
}

uint64_t begin_of(const Case& c, Rank rank) {
  return c.count * static_cast<uint64_t>(rank.value);
}

Buffer run_broadcast(Communicator& group, const Case& c, const Brought& brought) {
  Buffer data = brought(c.count);
  group.broadcast(data, c.dtype, c.root);
  return data;
}

Buffer expected_of_broadcast(const Case& c, Rank, int world_size) {
  return numbers(c, c.root, world_size, 0, c.count);
}

Buffer run_all_reduce(Communicator& group, const Case& c, const Brought& brought) {
  const Buffer in = brought(c.count);
  Buffer out(in.size());
  group.all_reduce(in, out, c.dtype, c.op, options_of(group, c));
  return out;
}

Buffer expected_of_all_reduce(const Case& c, Rank, int world_size) {
  return reduced(c, world_size, 0, c.count);
}

Buffer run_all_gather(Communicator& group, const Case& c, const Brought& brought) {
  const Buffer in = brought(c.count);
  Buffer out(in.size() * static_cast<size_t>(group.world_size()));
  group.all_gather(in, out, c.dtype);
  return out;
}

Buffer expected_of_all_gather(const Case& c, Rank, int world_size) {
  Buffer all;
  for (int rank = 0; rank < world_size; ++rank) {
    const Buffer part = numbers(c, rank, world_size, 0, c.count);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

Buffer run_reduce_scatter(Communicator& group, const Case& c, const Brought& brought) {
  const Buffer in = brought(c.count * static_cast<uint64_t>(group.world_size()));
  Buffer out(c.count * size_of(c.dtype));
  group.reduce_scatter(in, out, c.dtype, c.op, options_of(group, c));
  return out;
}

Buffer expected_of_reduce_scatter(const Case& c, Rank rank, int world_size) {
  return reduced(c, world_size, begin_of(c, rank), c.count);
}

Buffer run_barrier(Communicator& group, const Case&, const Brought&) {
  group.barrier();
  return {};
}

Buffer expected_of_barrier(const Case&, Rank, int) {
  return {};
}

// Round the ring: each rank sends to the next one and receives from the one before.
Buffer run_send_recv(Communicator& group, const Case& c, const Brought& brought) {
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

constexpr std::array<Collective, 6> kCollectives = {{
    {.name = "broadcast",
     .has_root = true,
     .is_same_everywhere = true,
     .run = run_broadcast,
     .expected = expected_of_broadcast},
    {.name = "all_reduce",
     .has_op = true,
     .is_same_everywhere = true,
     .run = run_all_reduce,
     .expected = expected_of_all_reduce},
    {.name = "all_gather",
     .takes_count_per_rank = true,
     .is_same_everywhere = true,
     .run = run_all_gather,
     .expected = expected_of_all_gather},
    {.name = "reduce_scatter",
     .has_op = true,
     .takes_count_per_rank = true,
     .run = run_reduce_scatter,
     .expected = expected_of_reduce_scatter},
    {.name = "barrier", .has_data = false, .run = run_barrier, .expected = expected_of_barrier},
    {.name = "send and recv", .run = run_send_recv, .expected = expected_of_send_recv},
}};

}  // namespace

std::span<const Collective> collectives() {
  return kCollectives;
}

}  // namespace cadre::conformance
