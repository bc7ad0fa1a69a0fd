#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "cadre/core/collective/net/algorithms.h"

namespace cadre {
namespace {

// The range [first, first + length) of places. The place of a rank is its distance from the root on
// the circle of all ranks.
struct Run {
  int first = 0;
  int length = 0;
};

// The position of this rank in the binomial tree whose root is key.root.
struct TreePlace {
  int place;                  // the place of this rank; that of the root is 0
  int extent;                 // the places of this rank's subtree are [place, place + extent)
  int parent;                 // the rank of the parent; kNobody for the root
  std::vector<Run> children;  // the subtrees of the children, of which the largest comes first
};

TreePlace place_in_tree(const ScheduleKey& key) {
  TreePlace tree{around(key, -key.root.value), key.world_size, kNobody, {}};
  int distance = 1;
  while (distance < key.world_size && (tree.place & distance) == 0) distance *= 2;
  if (tree.place != 0) {
    tree.parent = around(key, -distance);
    tree.extent = std::min(distance, key.world_size - tree.place);
  }
  for (distance /= 2; distance > 0; distance /= 2) {
    if (distance >= tree.extent) continue;
    tree.children.push_back({tree.place + distance, std::min(distance, tree.extent - distance)});
  }
  return tree;
}

// Says where a rank stores the parts of its subtree. On the root they are in rank order; on other
// ranks the parts of the descendants are in scratch memory, in the order of places.
class SubtreeBlocks {
 public:
  SubtreeBlocks(const ScheduleKey& key, const TreePlace& tree, Slot root_slot)
      : key_(key), tree_(tree), root_slot_(root_slot) {}

  // Returns the blocks that are sent for a child's subtree: the part of the child, which it keeps
  // in a separate slot, and the rest, divided where it passes from the last rank to rank 0.
  std::vector<Block> of(Run run) const {
    std::vector<Block> blocks = {block({run.first, 1})};
    const int wrap = key_.world_size - key_.root.value;  // the place of rank 0 on the circle
    const int begin = run.first + 1;
    const int end = run.first + run.length;
    const int cut = std::clamp(wrap, begin, end);
    if (begin < cut) blocks.push_back(block({begin, cut - begin}));
    if (cut < end) blocks.push_back(block({cut, end - cut}));
    return blocks;
  }

 private:
  Block block(Run run) const {
    const int begin = tree_.parent == kNobody ? (run.first + key_.root) % key_.world_size
                                              : run.first - tree_.place - 1;
    return {tree_.parent == kNobody ? root_slot_ : Slot::kScratch,
            static_cast<uint64_t>(begin) * key_.count,
            static_cast<uint64_t>(run.length) * key_.count};
  }

  const ScheduleKey& key_;
  const TreePlace& tree_;
  Slot root_slot_;
};

// Returns the blocks of this rank's subtree as its parent sees them: its own part, then the rest.
std::vector<Block> own_pieces(const ScheduleKey& key, const TreePlace& tree, Slot own_slot) {
  std::vector<Block> blocks = SubtreeBlocks(key, tree, own_slot).of({tree.place, tree.extent});
  blocks[0] = {own_slot, 0, key.count};
  return blocks;
}

uint64_t scratch_of(const ScheduleKey& key, const TreePlace& tree) {
  return tree.parent == kNobody ? 0 : static_cast<uint64_t>(tree.extent - 1) * key.count;
}

int rank_at(const ScheduleKey& key, int place) {
  return (place + key.root) % key.world_size;
}

}  // namespace

// Uses only those exchanges of recursive doubling (algorithms.h) that contribute to the root's sum:
// after the exchange at distance d only the ranks whose place agrees with the root's in the bits
// below 2d hold a partial sum that is still needed.
void add_tree_reduce(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  const int doubling = static_cast<int>(std::bit_floor(static_cast<unsigned>(key.world_size)));
  const int extra = key.world_size - doubling;
  const auto place_of = [&](int rank) { return rank < 2 * extra ? rank / 2 : rank - extra; };
  const int root_place = place_of(key.root);
  // Returns the rank at a place. If two ranks share the place, returns the root if it is one of
  // them, else the odd rank.
  const auto holder_of = [&](int place) {
    if (place == root_place) return key.root.value;
    return place < extra ? 2 * place + 1 : place + extra;
  };

  const bool is_root = key.rank == key.root;
  const Block sum{is_root ? Slot::kOutput : Slot::kScratch, 0, key.count};
  Block held{Slot::kInput, 0, key.count};
  const auto receive = [&](int from, bool completes) {
    schedule.steps.push_back(
        {.recv_from = from,
         .recv = sum,
         .combine = from < key.rank ? Combine::kReceivedFirst : Combine::kLocalFirst,
         .local = held,
         .completes = completes});
    held = sum;
    if (!is_root) schedule.scratch_count = key.count;
  };

  const int place = place_of(key.rank);
  int distance = 1;
  if (key.rank != holder_of(place)) {
    schedule.steps.push_back({.send_to = holder_of(place), .send = held});
    distance = doubling;  // ends the loop, because this rank is done
  } else if (key.rank < 2 * extra) {
    receive(key.rank ^ 1, false);
  }
  for (; distance < doubling; distance *= 2) {
    const int partner = holder_of(place ^ distance);
    if (((place ^ root_place) & distance) != 0) {
      schedule.steps.push_back({.send_to = partner, .send = held});
      break;
    }
    receive(partner, 2 * distance == doubling);
  }
  schedule.num_reduce_steps = schedule.steps.size();
}

void add_ring_reduce(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  const bool is_root = key.rank == key.root;
  const auto part = [&](int rank) { return part_of(key.count, key.world_size, rank); };
  const uint64_t longest = part(0).count;
  // The root accumulates in its output; other ranks use two buffers in turn.
  const auto partial = [&](int step, Block block) {
    if (is_root) return in_slot(Slot::kOutput, block);
    return Block{Slot::kScratch, static_cast<uint64_t>(step % 2) * longest, block.count};
  };
  const int last = key.world_size - 2;
  for (int step = 0; step <= last; ++step) {
    const Block sent = part(around(key, -step - 1));
    const Block received = part(around(key, -step - 2));
    schedule.steps.push_back(
        {.send_to = around(key, 1),
         .send = step == 0 ? in_slot(Slot::kInput, sent) : partial(step - 1, sent),
         .recv_from = around(key, -1),
         .recv = partial(step, received),
         .combine = Combine::kReceivedFirst,
         .local = in_slot(Slot::kInput, received),
         .completes = step == last});
  }
  schedule.num_reduce_steps = schedule.steps.size();
  if (!is_root) {
    schedule.scratch_count = 2 * longest;
    schedule.steps.push_back({.send_to = key.root, .send = partial(last, part(key.rank))});
    return;
  }
  for (int step = 1; step < key.world_size; ++step) {
    const int from = around(key, step);
    schedule.steps.push_back({.recv_from = from, .recv = part(from)});
  }
}

// Receives from the nearest child first: its subtree is the smallest, so its data is ready first.
void add_binomial_gather(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  const TreePlace tree = place_in_tree(key);
  const SubtreeBlocks blocks(key, tree, Slot::kOutput);
  for (auto child = tree.children.rbegin(); child != tree.children.rend(); ++child) {
    for (const Block& block : blocks.of(*child)) {
      schedule.steps.push_back({.recv_from = rank_at(key, child->first), .recv = block});
    }
  }
  schedule.scratch_count = scratch_of(key, tree);
  if (tree.parent == kNobody) return;
  for (const Block& block : own_pieces(key, tree, Slot::kInput)) {
    schedule.steps.push_back({.send_to = tree.parent, .send = block});
  }
}

// Sends to the farthest child first: its subtree is the largest and takes longest.
void add_binomial_scatter(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  const TreePlace tree = place_in_tree(key);
  schedule.scratch_count = scratch_of(key, tree);
  if (tree.parent != kNobody) {
    for (const Block& block : own_pieces(key, tree, Slot::kOutput)) {
      schedule.steps.push_back({.recv_from = tree.parent, .recv = block});
    }
  }
  const SubtreeBlocks blocks(key, tree, Slot::kInput);
  for (const Run& child : tree.children) {
    for (const Block& block : blocks.of(child)) {
      schedule.steps.push_back({.send_to = rank_at(key, child.first), .send = block});
    }
  }
}

void add_linear_gather(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  if (key.rank != key.root) {
    schedule.steps.push_back({.send_to = key.root, .send = {Slot::kInput, 0, key.count}});
    return;
  }
  for (int step = 1; step < key.world_size; ++step) {
    const int from = around(key, step);
    schedule.steps.push_back(
        {.recv_from = from,
         .recv = {Slot::kOutput, static_cast<uint64_t>(from) * key.count, key.count}});
  }
}

void add_linear_scatter(Schedule& schedule) {
  const ScheduleKey& key = schedule.key;
  if (key.rank != key.root) {
    schedule.steps.push_back({.recv_from = key.root, .recv = {Slot::kOutput, 0, key.count}});
    return;
  }
  for (int step = 1; step < key.world_size; ++step) {
    const int to = around(key, step);
    schedule.steps.push_back(
        {.send_to = to, .send = {Slot::kInput, static_cast<uint64_t>(to) * key.count, key.count}});
  }
}

}  // namespace cadre
