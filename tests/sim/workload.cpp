#include "workload.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "cadre/base/format.h"
#include "cadre/comm/messages/message_header.h"
#include "cadre/testing/ranks.h"

namespace cadre::testing {
namespace {

constexpr int kNumTags = 3;
constexpr size_t kMaxCount = 3000;
constexpr DType kType = DType::kInt32;

using Values = std::vector<int32_t>;

// What a rank puts into a collective.
int32_t value_of(const Step& step, int rank, size_t index) {
  return static_cast<int32_t>(step.seed % 1000) + 1009 * rank + static_cast<int32_t>(index % 97);
}

Values values_of(const Step& step, int rank, size_t count) {
  Values values(count);
  for (size_t i = 0; i < count; ++i) values[i] = value_of(step, rank, i);
  return values;
}

int32_t sum_of(const Step& step, int world_size, size_t index) {
  int32_t sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += value_of(step, rank, index);
  return sum;
}

ConstBytes in_bytes(const Values& values) {
  return std::as_bytes(std::span(values));
}
Bytes out_bytes(Values& values) {
  return std::as_writable_bytes(std::span(values));
}

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
  step.count = 1 + random.below(random.below(2) == 0 ? 8 : kMaxCount);
  step.root = static_cast<int>(random.below(static_cast<uint64_t>(world_size)));
  step.in_place = random.below(2) == 0;
  if (kind == Step::Kind::kMessages) step.letters = make_letters(random, world_size);
  step.blocks_in_sends = random.below(3) == 0;
  step.reduces_between = random.below(2) == 0;
  return step;
}

template <class T>
void shuffle(std::vector<T>& items, Random& random) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.below(i)]);
}

// One rank's part in a step of messages.
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

  // Any order of tags and senders, but the first receive of a (sender, tag) takes its first letter.
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

void all_reduce(Communicator& group, const Step& step, Bytes in, Bytes out) {
  const std::span<int32_t> values(reinterpret_cast<int32_t*>(in.data()), step.count);
  for (size_t i = 0; i < step.count; ++i) values[i] = value_of(step, group.rank().value, i);
  group.all_reduce(in, out, kType, ReduceOp::kSum);
  const std::span<const int32_t> sums(reinterpret_cast<const int32_t*>(out.data()), step.count);
  for (size_t i = 0; i < step.count; ++i) {
    require(sums[i] == sum_of(step, group.world_size(), i), "wrong sum");
  }
}

void all_reduce(Communicator& group, const Step& step) {
  Values in(step.count);
  Values out(step.count);
  all_reduce(group, step, out_bytes(in), out_bytes(out));
}

void all_gather(Communicator& group, const Step& step) {
  const Values mine = values_of(step, group.rank().value, step.count);
  Values all(step.count * static_cast<size_t>(group.world_size()));
  group.all_gather(in_bytes(mine), out_bytes(all), kType);
  for (size_t i = 0; i < all.size(); ++i) {
    const int from = static_cast<int>(i / step.count);
    require(all[i] == value_of(step, from, i % step.count), "wrong gather");
  }
}

void reduce_scatter(Communicator& group, const Step& step) {
  const auto world = static_cast<size_t>(group.world_size());
  const Values in = values_of(step, group.rank().value, step.count * world);
  Values out(step.count);
  group.reduce_scatter(in_bytes(in), out_bytes(out), kType, ReduceOp::kSum);
  const size_t first = static_cast<size_t>(group.rank().value) * step.count;
  for (size_t i = 0; i < step.count; ++i) {
    require(out[i] == sum_of(step, group.world_size(), first + i), "wrong scattered sum");
  }
}

void broadcast(Communicator& group, const Step& step) {
  Values data = values_of(step, group.rank().value, step.count);
  group.broadcast(out_bytes(data), kType, step.root);
  require(data == values_of(step, step.root, step.count), "wrong broadcast");
}

void run_step(Communicator& group, const Step& step, Bytes symmetric) {
  switch (step.kind) {
    case Step::Kind::kAllReduce: {
      const Bytes part = symmetric.first(step.count * size_of(kType));
      return step.in_place ? all_reduce(group, step, part, part) : all_reduce(group, step);
    }
    case Step::Kind::kAllGather:
      return all_gather(group, step);
    case Step::Kind::kReduceScatter:
      return reduce_scatter(group, step);
    case Step::Kind::kBroadcast:
      return broadcast(group, step);
    case Step::Kind::kBarrier:
      return group.barrier();
    case Step::Kind::kMessages:
      return Exchange(group, step).run([&] {
        if (step.reduces_between) all_reduce(group, step);
      });
  }
}

}  // namespace

Program make_program(uint64_t seed, int world_size) {
  using Kind = Step::Kind;
  Random random(seed);
  std::vector<Kind> kinds = {Kind::kMessages, Kind::kAllReduce};
  constexpr std::array<Kind, 7> kMore = {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                                         Kind::kBroadcast, Kind::kBarrier,   Kind::kMessages,
                                         Kind::kMessages};
  const uint64_t num_more = 1 + random.below(4);
  for (uint64_t i = 0; i < num_more; ++i) kinds.push_back(kMore[random.below(kMore.size())]);
  shuffle(kinds, random);
  Program program;
  for (const Kind kind : kinds) program.steps.push_back(make_step(random, world_size, kind));
  const auto sum = std::ranges::find(program.steps, Kind::kAllReduce, &Step::kind);
  sum->in_place = true;
  return program;
}

void run_program(Communicator& group, const Program& program) {
  constexpr std::byte kMark{42};
  constexpr size_t kNumBytes = kMaxCount * sizeof(int32_t);
  const auto untouched = group.allocate_symmetric(kNumBytes);
  const auto symmetric = group.allocate_symmetric(kNumBytes);
  untouched->local()[7] = kMark;
  for (const Step& step : program.steps) run_step(group, step, symmetric->local());
  group.barrier();
  require(untouched->local()[7] == kMark, "another buffer was written to");
}

}  // namespace cadre::testing
