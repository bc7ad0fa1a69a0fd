#include "cadre/core/collective/net/algorithms.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace cadre {

int around(const ScheduleKey& key, int offset) {
  const int size = key.world_size;
  return ((key.rank.value + offset) % size + size) % size;
}

Block in_slot(Slot slot, Block block) {
  block.slot = slot;
  return block;
}

namespace {

// Returns the block of a rank's part in a slot that has the parts of all ranks in rank order.
Block part_in_order(Slot slot, std::span<const uint64_t> counts, int rank) {
  const auto index = static_cast<size_t>(rank);
  const auto before = counts.first(index);
  return {slot, std::accumulate(before.begin(), before.end(), uint64_t{0}), counts[index]};
}

// Sends the finished parts once around the ring (an all_gather). Before the first step, each rank
// has its own part in the output.
template <typename PartOf>
void add_ring_gather_steps(Schedule& schedule, PartOf part_of_rank) {
  const ScheduleKey& key = schedule.key;
  for (int step = 0; step < key.world_size - 1; ++step) {
    schedule.steps.push_back({.send_to = around(key, 1),
                              .send = part_of_rank(around(key, -step)),
                              .recv_from = around(key, -1),
                              .recv = part_of_rank(around(key, -step - 1))});
  }
}

}  // namespace

void add_ring_all_reduce(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  const auto part = [&](int rank) { return part_of(key.count, key.world_size, rank); };
  const int last = key.world_size - 2;
  for (int step = 0; step <= last; ++step) {
    const Block sent = part(around(key, -step - 1));
    const Block received = part(around(key, -step - 2));
    schedule.steps.push_back({.send_to = around(key, 1),
                              .send = in_slot(step == 0 ? Slot::kInput : Slot::kOutput, sent),
                              .recv_from = around(key, -1),
                              .recv = received,
                              .combine = Combine::kReceivedFirst,
                              .local = in_slot(Slot::kInput, received),
                              .completes = step == last});
  }
  schedule.num_reduce_steps = schedule.steps.size();
  add_ring_gather_steps(schedule, part);
}

void add_ring_reduce_scatter(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  add_ring_reduce_scatter_of(schedule,
                             std::vector<uint64_t>(static_cast<size_t>(key.world_size), key.count));
}

void add_ring_reduce_scatter_of(Schedule& schedule, std::span<const uint64_t> counts) {
  const ScheduleKey& key = schedule.key;
  const auto input_of = [&](int rank) { return part_in_order(Slot::kInput, counts, rank); };
  const uint64_t longest = *std::max_element(counts.begin(), counts.end());
  // A partial result is sent while the next one is received, so two buffers are used in turn.
  const auto partial = [&](int step) {
    return Block{Slot::kScratch, static_cast<uint64_t>(step % 2) * longest,
                 input_of(around(key, -step - 2)).count};
  };
  const int last = key.world_size - 2;
  for (int step = 0; step <= last; ++step) {
    const Block local = input_of(around(key, -step - 2));
    schedule.steps.push_back(
        {.send_to = around(key, 1),
         .send = step == 0 ? input_of(around(key, -1)) : partial(step - 1),
         .recv_from = around(key, -1),
         .recv = step == last ? Block{Slot::kOutput, 0, local.count} : partial(step),
         .combine = Combine::kReceivedFirst,
         .local = local,
         .completes = step == last});
  }
  schedule.scratch_count = key.world_size > 2 ? 2 * longest : 0;
  schedule.num_reduce_steps = schedule.steps.size();
}

void add_ring_all_gather(Schedule& schedule) {
  const uint64_t count = schedule.key.count;
  add_ring_gather_steps(schedule, [count](int rank) {
    return Block{Slot::kOutput, static_cast<uint64_t>(rank) * count, count};
  });
}

// There are P = 2^k + extra ranks. In each of the first `extra` pairs of neighbours one rank sends
// its input to the other one, which adds it; then 2^k ranks run the doubling; at the end the first
// rank of each pair gets the result. Both partners of an exchange take the lower ranks' sum as the
// left operand, so they compute the same bits.
void add_recursive_doubling(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  const int rank = key.rank;
  const int doubling = static_cast<int>(std::bit_floor(static_cast<unsigned>(key.world_size)));
  const int extra = key.world_size - doubling;
  const Block all{Slot::kOutput, 0, key.count};
  Block held = in_slot(Slot::kInput, all);

  const bool is_paired = rank < 2 * extra;
  if (is_paired && rank % 2 == 0) {
    schedule.steps.push_back({.send_to = rank + 1, .send = held});
    schedule.num_reduce_steps = 1;
    schedule.steps.push_back({.recv_from = rank + 1, .recv = all});
    return;
  }
  if (is_paired) {
    schedule.steps.push_back(
        {.recv_from = rank - 1, .recv = all, .combine = Combine::kReceivedFirst, .local = held});
    held = all;
  }
  const int place = is_paired ? rank / 2 : rank - extra;
  for (int distance = 1; distance < doubling; distance *= 2) {
    const int other = place ^ distance;
    const int partner = other < extra ? 2 * other + 1 : other + extra;
    schedule.steps.push_back(
        {.send_to = partner,
         .send = held,
         .recv_from = partner,
         .recv = all,
         .combine = other < place ? Combine::kReceivedFirst : Combine::kLocalFirst,
         .local = held,
         .completes = 2 * distance == doubling});
    held = all;
  }
  schedule.num_reduce_steps = schedule.steps.size();
  if (is_paired) schedule.steps.push_back({.send_to = rank - 1, .send = all});
}

// A rank has 2d blocks after the exchange at distance d: its own and those that follow it.
void add_bruck_all_gather(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  const auto size = static_cast<uint64_t>(key.world_size);
  // Returns the range of the `length` blocks from `first` on, or two ranges if they wrap around.
  const auto pieces_of = [&](int first, uint64_t length) {
    const auto begin = static_cast<uint64_t>(first);
    const uint64_t straight = std::min(length, size - begin);
    std::vector<Block> pieces{{Slot::kOutput, begin * key.count, straight * key.count}};
    if (straight < length) {
      pieces.push_back({Slot::kOutput, 0, (length - straight) * key.count});
    }
    return pieces;
  };
  for (int distance = 1; distance < key.world_size; distance *= 2) {
    const auto length = static_cast<uint64_t>(std::min(distance, key.world_size - distance));
    const std::vector<Block> sent = pieces_of(key.rank, length);
    const std::vector<Block> received = pieces_of(around(key, distance), length);
    for (size_t i = 0; i < std::max(sent.size(), received.size()); ++i) {
      Step step;
      if (i < sent.size()) {
        step.send_to = around(key, -distance);
        step.send = sent[i];
      }
      if (i < received.size()) {
        step.recv_from = around(key, distance);
        step.recv = received[i];
      }
      schedule.steps.push_back(step);
    }
  }
}

void add_binomial_broadcast(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  const Block all{Slot::kOutput, 0, key.count};
  const int from_root = around(key, -key.root.value);
  int distance = 1;
  while (distance < key.world_size && (from_root & distance) == 0) distance *= 2;
  if (from_root != 0) {
    schedule.steps.push_back({.recv_from = around(key, -distance), .recv = all});
  }
  for (distance /= 2; distance > 0; distance /= 2) {
    if (from_root + distance < key.world_size) {
      schedule.steps.push_back({.send_to = around(key, distance), .send = all});
    }
  }
}

// Each rank passes a segment on while it receives the next one.
void add_chain_broadcast(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  const int from_root = around(key, -key.root.value);
  const bool has_previous = from_root > 0;
  const bool has_next = from_root < key.world_size - 1;
  // Empty data is sent as one empty segment, so that the ranks still compare the operation.
  const uint64_t num_segments =
      std::max<uint64_t>(1, (key.count + key.segment_count - 1) / key.segment_count);
  const auto segment = [&](uint64_t index) {
    const uint64_t begin = index * key.segment_count;
    return Block{Slot::kOutput, begin, std::min(key.segment_count, key.count - begin)};
  };
  const uint64_t lag = has_previous ? 1 : 0;
  for (uint64_t i = 0; i < num_segments + lag; ++i) {
    Step step;
    if (has_previous && i < num_segments) {
      step.recv_from = around(key, -1);
      step.recv = segment(i);
    }
    if (has_next && i >= lag) {
      step.send_to = around(key, 1);
      step.send = segment(i - lag);
    }
    if (step.recv_from != kNobody || step.send_to != kNobody) schedule.steps.push_back(step);
  }
}

void add_dissemination_barrier(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  for (int distance = 1; distance < key.world_size; distance *= 2) {
    schedule.steps.push_back(
        {.send_to = around(key, distance), .recv_from = around(key, -distance)});
  }
}

void add_pairwise_exchange(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  const auto part = [&](Slot slot, int rank) {
    return Block{slot, static_cast<uint64_t>(rank) * key.count, key.count};
  };
  for (int step = 1; step < key.world_size; ++step) {
    const int to = around(key, step);
    const int from = around(key, -step);
    schedule.steps.push_back({.send_to = to,
                              .send = part(Slot::kInput, to),
                              .recv_from = from,
                              .recv = part(Slot::kOutput, from)});
  }
}

// The ranks have exchanged and compared their counts before this schedule runs, so an empty part is
// not sent.
void add_pairwise_exchange_of(Schedule& schedule, const PartCounts& counts) {
  const ScheduleKey& key = schedule.key;
  for (int step = 1; step < key.world_size; ++step) {
    const int to = around(key, step);
    const int from = around(key, -step);
    Step exchange{.send = part_in_order(Slot::kInput, counts.sent, to),
                  .recv = part_in_order(Slot::kOutput, counts.received, from)};
    if (exchange.send.count > 0) exchange.send_to = to;
    if (exchange.recv.count > 0) exchange.recv_from = from;
    if (exchange.send_to != kNobody || exchange.recv_from != kNobody) {
      schedule.steps.push_back(exchange);
    }
  }
}

// Empty parts are sent as messages, too: they carry the fingerprint, by which a receiver detects
// that the sender passed other counts.
void add_pairwise_gather_of(Schedule& schedule, std::span<const uint64_t> counts) {
  const ScheduleKey& key = schedule.key;
  const Block own{Slot::kInput, 0, counts[static_cast<size_t>(key.rank.value)]};
  for (int step = 1; step < key.world_size; ++step) {
    const int from = around(key, -step);
    schedule.steps.push_back({.send_to = around(key, step),
                              .send = own,
                              .recv_from = from,
                              .recv = part_in_order(Slot::kOutput, counts, from)});
  }
}

}  // namespace cadre
