#include "collectives.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>

namespace cadre::conformance {
namespace {

using Buffer = std::vector<std::byte>;

Reduction reduction_of(const Communicator& group, const Case& c) {
  return c.op == ReduceOp::kPremulSum ? Reduction::premul_sum(factor_of(group.rank())) : c.op;
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
  group.all_reduce(in, out, c.dtype, reduction_of(group, c));
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

// Elements of one rank: some are empty, and all counts occur.
uint64_t uneven_part(const Case& c, int rank) {
  return rank % 4 == 3 ? 0 : c.count + static_cast<uint64_t>(2 * rank % 3);
}

Buffer run_all_gather_v(Communicator& group, const Case& c, const Brought& brought) {
  std::vector<uint64_t> counts;
  for (int rank = 0; rank < group.world_size(); ++rank) counts.push_back(uneven_part(c, rank));
  const Buffer in = brought(counts[static_cast<size_t>(group.rank().value)]);
  Buffer out(std::accumulate(counts.begin(), counts.end(), uint64_t{0}) * size_of(c.dtype));
  group.all_gather_v(in, out, c.dtype, counts);
  return out;
}

Buffer expected_of_all_gather_v(const Case& c, Rank, int world_size) {
  Buffer all;
  for (int rank = 0; rank < world_size; ++rank) {
    const Buffer part = numbers(c, rank, world_size, 0, uneven_part(c, rank));
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

Buffer run_reduce_scatter(Communicator& group, const Case& c, const Brought& brought) {
  const Buffer in = brought(c.count * static_cast<uint64_t>(group.world_size()));
  Buffer out(c.count * size_of(c.dtype));
  group.reduce_scatter(in, out, c.dtype, reduction_of(group, c));
  return out;
}

Buffer expected_of_reduce_scatter(const Case& c, Rank rank, int world_size) {
  return reduced(c, world_size, begin_of(c, rank), c.count);
}

Buffer run_reduce_scatter_v(Communicator& group, const Case& c, const Brought& brought) {
  std::vector<uint64_t> counts;
  for (int rank = 0; rank < group.world_size(); ++rank) counts.push_back(uneven_part(c, rank));
  const Buffer in = brought(std::accumulate(counts.begin(), counts.end(), uint64_t{0}));
  Buffer out(counts[static_cast<size_t>(group.rank().value)] * size_of(c.dtype));
  group.reduce_scatter_v(in, out, c.dtype, reduction_of(group, c), counts);
  return out;
}

Buffer expected_of_reduce_scatter_v(const Case& c, Rank rank, int world_size) {
  uint64_t begin = 0;
  for (int before = 0; before < rank.value; ++before) begin += uneven_part(c, before);
  return reduced(c, world_size, begin, uneven_part(c, rank));
}

Buffer run_reduce(Communicator& group, const Case& c, const Brought& brought) {
  const Buffer in = brought(c.count);
  Buffer out(group.rank() == c.root ? in.size() : 0);
  group.reduce(in, out, c.dtype, reduction_of(group, c), c.root);
  return out;
}

Buffer expected_of_reduce(const Case& c, Rank rank, int world_size) {
  return rank == c.root ? reduced(c, world_size, 0, c.count) : Buffer();
}

Buffer run_gather(Communicator& group, const Case& c, const Brought& brought) {
  const Buffer in = brought(c.count);
  const auto num_parts = static_cast<size_t>(group.world_size());
  Buffer out(group.rank() == c.root ? in.size() * num_parts : 0);
  group.gather(in, out, c.dtype, c.root);
  return out;
}

Buffer expected_of_gather(const Case& c, Rank rank, int world_size) {
  return rank == c.root ? expected_of_all_gather(c, rank, world_size) : Buffer();
}

Buffer run_scatter(Communicator& group, const Case& c, const Brought& brought) {
  const auto num_parts = static_cast<uint64_t>(group.world_size());
  const Buffer in = group.rank() == c.root ? brought(c.count * num_parts) : Buffer();
  Buffer out(c.count * size_of(c.dtype));
  group.scatter(in, out, c.dtype, c.root);
  return out;
}

Buffer expected_of_scatter(const Case& c, Rank rank, int world_size) {
  return numbers(c, c.root, world_size, begin_of(c, rank), c.count);
}

Buffer run_all_to_all(Communicator& group, const Case& c, const Brought& brought) {
  const Buffer in = brought(c.count * static_cast<uint64_t>(group.world_size()));
  Buffer out(in.size());
  group.all_to_all(in, out, c.dtype);
  return out;
}

Buffer expected_of_all_to_all(const Case& c, Rank rank, int world_size) {
  Buffer all;
  for (int from = 0; from < world_size; ++from) {
    const Buffer part = numbers(c, from, world_size, begin_of(c, rank), c.count);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

// Elements from one rank to another in the uneven exchange: some pairs differ, all counts occur.
uint64_t uneven_count(const Case& c, int from, int to) {
  return c.count + static_cast<uint64_t>((from + 2 * to) % 3);
}

Buffer run_all_to_all_v(Communicator& group, const Case& c, const Brought& brought) {
  std::vector<uint64_t> sent, received;
  for (int peer = 0; peer < group.world_size(); ++peer) {
    sent.push_back(uneven_count(c, group.rank(), peer));
    received.push_back(uneven_count(c, peer, group.rank()));
  }
  const Buffer in = brought(std::accumulate(sent.begin(), sent.end(), uint64_t{0}));
  Buffer out(std::accumulate(received.begin(), received.end(), uint64_t{0}) * size_of(c.dtype));
  group.all_to_all_v(in, out, c.dtype, {sent, received});
  return out;
}

Buffer expected_of_all_to_all_v(const Case& c, Rank rank, int world_size) {
  Buffer all;
  for (int from = 0; from < world_size; ++from) {
    uint64_t begin = 0;
    for (int to = 0; to < rank; ++to) begin += uneven_count(c, from, to);
    const Buffer part = numbers(c, from, world_size, begin, uneven_count(c, from, rank));
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

int64_t ticks_now() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}

// Every rank in turn comes later than the others. All run on one host, whose clock orders what they
// do: 1 for each turn in which no rank left before the last one had entered.
Buffer run_barrier(Communicator& group, const Case&, const Brought&) {
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

constexpr std::array<Collective, 13> kCollectives = {{
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
    {.name = "all_gather_v",
     .takes_count_per_rank = true,
     .is_same_everywhere = true,
     .run = run_all_gather_v,
     .expected = expected_of_all_gather_v},
    {.name = "reduce_scatter",
     .has_op = true,
     .takes_count_per_rank = true,
     .run = run_reduce_scatter,
     .expected = expected_of_reduce_scatter},
    {.name = "reduce_scatter_v",
     .has_op = true,
     .takes_count_per_rank = true,
     .run = run_reduce_scatter_v,
     .expected = expected_of_reduce_scatter_v},
    {.name = "reduce",
     .has_op = true,
     .has_root = true,
     .run = run_reduce,
     .expected = expected_of_reduce},
    {.name = "gather",
     .has_root = true,
     .takes_count_per_rank = true,
     .run = run_gather,
     .expected = expected_of_gather},
    {.name = "scatter",
     .has_root = true,
     .takes_count_per_rank = true,
     .run = run_scatter,
     .expected = expected_of_scatter},
    {.name = "all_to_all",
     .takes_count_per_rank = true,
     .run = run_all_to_all,
     .expected = expected_of_all_to_all},
    {.name = "all_to_all_v",
     .takes_count_per_rank = true,
     .run = run_all_to_all_v,
     .expected = expected_of_all_to_all_v},
    {.name = "barrier", .has_data = false, .run = run_barrier, .expected = expected_of_barrier},
    {.name = "send and recv", .run = run_send_recv, .expected = expected_of_send_recv},
}};

}  // namespace

std::span<const Collective> collectives() {
  return kCollectives;
}

}  // namespace cadre::conformance
