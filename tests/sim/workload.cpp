#include "workload.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/comm/messages/message_header.h"
#include "cadre/testing/core/ranks.h"
#include "collective_steps.h"

namespace cadre::testing {
namespace {

constexpr int kNumTags = 3;

std::vector<std::byte> bytes_of(const Letter& letter) {
  std::vector<std::byte> bytes(letter.num_bytes);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>((letter.content >> (i % 8 * 8)) + i / 8);
  }
  return bytes;
}

size_t letter_size(Random& random) {
  constexpr size_t kLimit = MessageHeader::kMaxEagerBytes;
  const std::array<size_t, 7> sizes = {0,      1,          200 + random.below(3000),     kLimit - 1,
                                       kLimit, kLimit + 1, kLimit + random.below(60'000)};
  return sizes[random.below(sizes.size())];
}

std::vector<Letter> make_letters(Random& random, int world_size) {
  std::vector<Letter> letters;
  const uint64_t num_bursts = 2 + random.below(static_cast<uint64_t>(world_size));
  for (uint64_t burst = 0; burst < num_bursts; ++burst) {
    const int a = static_cast<int>(random.below(static_cast<uint64_t>(world_size)));
    const int b = (a + 1 + static_cast<int>(random.below(static_cast<uint64_t>(world_size - 1)))) %
                  world_size;
    for (uint64_t i = 0; i < 2 + random.below(4); ++i) {
      const bool is_back = random.below(3) == 0;
      letters.push_back({is_back ? b : a, is_back ? a : b, static_cast<int>(random.below(kNumTags)),
                         letter_size(random), random.next()});
    }
  }
  return letters;
}

Step make_step(Random& random, int world_size, Step::Kind kind) {
  Step step;
  step.kind = kind;
  step.seed = random.next();
  step.count = 1 + random.below(random.below(2) == 0 ? 8 : kMaxStepCount);
  step.root = static_cast<int>(random.below(static_cast<uint64_t>(world_size)));
  step.is_symmetric = random.below(2) == 0;
  if (kind == Step::Kind::kMessages) step.letters = make_letters(random, world_size);
  step.blocks_in_sends = random.below(3) == 0;
  step.reduces_between = random.below(2) == 0;
  return step;
}

template <class T>
void shuffle(std::vector<T>& items, Random& random) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.below(i)]);
}

// Runs one rank's sends and receives of a step of messages.
class Exchange {
 public:
  Exchange(Communicator& group, const Step& step)
      : group_(group), step_(step), random_(step.seed + static_cast<uint64_t>(group.rank().value)) {
    for (const Letter& letter : step.letters) {
      if (group.rank() == letter.from) sends_.push_back(&letter);
      if (group.rank() == letter.to) receives_.push_back({&letter, nullptr});
    }
    mix_receives();
  }

  void run(const std::function<void()>& between) {
    size_t num_sent = 0;
    size_t num_posted = 0;
    const size_t num_sends_first = step_.blocks_in_sends ? 0 : sends_.size();
    const size_t num_posts_first =
        step_.blocks_in_sends ? receives_.size() : random_.below(receives_.size() + 1);
    while (num_sent < num_sends_first || num_posted < num_posts_first) {
      const bool can_send = num_sent < num_sends_first;
      if (can_send && (num_posted == num_posts_first || random_.below(2) == 0)) {
        send(*sends_[num_sent++], true);
      } else {
        receive(receives_[num_posted++], true);
      }
    }
    between();
    while (num_sent < sends_.size()) send(*sends_[num_sent++], false);
    while (num_posted < receives_.size()) receive(receives_[num_posted++], false);
    shuffle(works_, random_);
    for (const Work& work : works_) work.wait();
    for (const Receive& receive : receives_) check(receive);
  }

 private:
  using Memory = std::vector<std::byte>;
  struct Receive {
    const Letter* letter;
    std::shared_ptr<Memory> memory;  // shared with the Work, which may outlive a failed step
  };

  // Shuffles the order in which this rank receives. Receives with the same sender and tag must keep
  // their order, because messages are matched in order.
  void mix_receives() {
    std::vector<Receive> in_order = receives_;
    shuffle(receives_, random_);
    for (Receive& receive : receives_) {
      const auto first = std::ranges::find_if(in_order, [&](const Receive& other) {
        return other.letter->from == receive.letter->from &&
               other.letter->tag == receive.letter->tag;
      });
      receive = *first;
      in_order.erase(first);
    }
  }

  void send(const Letter& letter, bool is_async) {
    const auto memory = std::make_shared<Memory>(bytes_of(letter));
    const DType type = DType::kUint8;
    if (is_async) {
      works_.push_back(
          group_.send_async(*memory, type, letter.to, letter.tag, {.keep_alive = memory}));
    } else {
      group_.send(*memory, type, letter.to, letter.tag);
    }
  }

  void receive(Receive& receive, bool is_async) {
    const Letter& letter = *receive.letter;
    receive.memory = std::make_shared<Memory>(letter.num_bytes, std::byte{0xee});
    const DType type = DType::kUint8;
    if (is_async) {
      works_.push_back(group_.recv_async(*receive.memory, type, letter.from, letter.tag,
                                         {.keep_alive = receive.memory}));
    } else {
      group_.recv(*receive.memory, type, letter.from, letter.tag);
    }
  }

  static void check(const Receive& receive) {
    const Letter& letter = *receive.letter;
    require(*receive.memory == bytes_of(letter),
            format("wrong bytes in a message of {} bytes from rank {} with tag {}",
                   letter.num_bytes, letter.from, letter.tag));
  }

  Communicator& group_;
  const Step& step_;
  Random random_;
  std::vector<const Letter*> sends_;
  std::vector<Receive> receives_;
  std::vector<Work> works_;
};

// Makes two more groups of all ranks, in one of them with the ranks in reverse order, and runs an
// all_reduce in both at the same time. Every second rank issues the two in the reverse order.
class TwoGroups {
 public:
  TwoGroups(Communicator& world, const Step& step)
      : world_(world),
        step_(step),
        deadline_(world.system().deadline_in(world.options().timeout)) {}

  void run() {
    groups_[0] = split(world_, {.color = 0, .name = world_.name()}, deadline_);
    groups_[1] =
        split(world_, {.color = 0, .key = -world_.rank(), .name = world_.name()}, deadline_);
    const bool is_reversed = (world_.rank() + step_.seed) % 2 == 0;
    for (const size_t i : {size_t{0}, size_t{1}}) issue(is_reversed ? 1 - i : i);
    for (const size_t i : {size_t{0}, size_t{1}})
      in_ranks_of_world(*groups_[i], [&] { works_[i]->wait(); });
    for (const size_t i : {size_t{0}, size_t{1}}) check(i);
    for (auto& group : groups_) group->close(deadline_);
  }

 private:
  using Values = std::vector<int64_t>;

  int64_t value_of(int rank, size_t group, size_t index) const {
    return static_cast<int64_t>(step_.seed % 1009) * (rank + 1) +
           static_cast<int64_t>(group * 17 + index % 251);
  }

  void issue(size_t i) {
    values_[i] = std::make_shared<Values>(step_.count);
    for (size_t at = 0; at < step_.count; ++at) {
      (*values_[i])[at] = value_of(world_.rank(), i, at);
    }
    const Bytes bytes = std::as_writable_bytes(std::span(*values_[i]));
    in_ranks_of_world(*groups_[i], [&] {
      works_[i].emplace(groups_[i]->all_reduce_async(bytes, bytes, DType::kInt64, ReduceOp::kSum,
                                                     {.keep_alive = values_[i]}));
    });
  }

  void check(size_t i) const {
    for (size_t at = 0; at < step_.count; ++at) {
      int64_t sum = 0;
      for (int rank = 0; rank < world_.world_size(); ++rank) sum += value_of(rank, i, at);
      require((*values_[i])[at] == sum, format("a wrong sum in group {} at {}", i, at));
    }
  }

  // Runs `body`. If it throws, replaces the ranks in the error by ranks of the world, because the
  // check of the job's errors uses ranks of the world.
  template <typename Body>
  static void in_ranks_of_world(const Communicator& group, const Body& body) {
    try {
      body();
    } catch (const Error& error) {
      ErrorDetails details = error.details();
      for (auto* const rank : {&details.culprit, &details.reporter}) {
        if (*rank) *rank = group.global_rank(**rank);
      }
      throw Error(error.code(), error.message()).with_details(std::move(details));
    }
  }

  Communicator& world_;
  const Step& step_;
  const Deadline deadline_;
  // Shared with the Work objects, which may outlive a failed step.
  std::array<std::shared_ptr<Values>, 2> values_;
  std::array<std::unique_ptr<Communicator>, 2> groups_;
  std::array<std::optional<Work>, 2> works_;
};

// Runs an all_reduce of its own while messages are in flight.
void sum_between(Communicator& group, const Step& step) {
  Step sum = step;
  sum.kind = Step::Kind::kAllReduce;
  sum.is_symmetric = false;
  run_collective(group, sum, {});
}

void run_step(Communicator& group, const Step& step, Bytes symmetric) {
  if (step.kind == Step::Kind::kTwoGroups) return TwoGroups(group, step).run();
  if (step.kind != Step::Kind::kMessages) return run_collective(group, step, symmetric);
  Exchange(group, step).run([&] {
    if (step.reduces_between) sum_between(group, step);
  });
}

}  // namespace

Program make_program(uint64_t seed, int world_size) {
  using Kind = Step::Kind;
  Random random(seed);
  std::vector<Kind> kinds = {Kind::kMessages, Kind::kAllReduce};
  // Each kind of collective is chosen with equal probability, messages with twice that probability.
  constexpr uint64_t kNumChoices = Step::kNumKinds + 1;
  const uint64_t num_more = 1 + random.below(4);
  for (uint64_t i = 0; i < num_more; ++i) {
    const auto choice = static_cast<int>(random.below(kNumChoices));
    kinds.push_back(static_cast<Kind>(std::min(choice, Step::kNumKinds - 1)));
  }
  shuffle(kinds, random);
  Program program;
  for (const Kind kind : kinds) program.steps.push_back(make_step(random, world_size, kind));
  const auto sum = std::ranges::find(program.steps, Kind::kAllReduce, &Step::kind);
  sum->is_symmetric = true;
  return program;
}

void run_program(Communicator& group, const Program& program) {
  constexpr std::byte kMark{42};
  const size_t num_bytes = symmetric_bytes(group.world_size());
  for (int i = 0; i < 2; ++i) {
    const auto passing = group.allocate_symmetric(num_bytes);
    require(std::ranges::all_of(passing->local(), [](std::byte b) { return b == std::byte{0}; }),
            "memory that was used before is not zero");
    std::ranges::fill(passing->local(), kMark);
    group.barrier();
  }
  const auto untouched = group.allocate_symmetric(num_bytes);
  const auto symmetric = group.allocate_symmetric(num_bytes);
  untouched->local()[7] = kMark;
  for (const Step& step : program.steps) run_step(group, step, symmetric->local());
  group.barrier();
  require(untouched->local()[7] == kMark, "another buffer was written to");
}

}  // namespace cadre::testing
