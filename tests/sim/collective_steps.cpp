#include "collective_steps.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/core/ranks.h"

namespace cadre::testing {
namespace {

constexpr DType kType = DType::kInt32;

using Values = std::vector<int32_t>;
using Span = std::span<int32_t>;

// What a rank puts into a collective.
int32_t value_of(const Step& step, int rank, size_t index) {
  return static_cast<int32_t>(step.seed % 1000) + 100'003 * rank +
         static_cast<int32_t>(index % 8629);
}

int32_t sum_of(const Step& step, int world_size, size_t index) {
  int32_t sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += value_of(step, rank, index);
  return sum;
}

// One rank's part in one collective.
class Part {
 public:
  Part(Communicator& group, const Step& step, Bytes symmetric)
      : group_(group), step_(step), symmetric_(symmetric) {}

  void all_reduce() {
    const Span in = make_input(step_.count);
    Values own(step_.is_symmetric ? 0 : step_.count);
    const Span out = step_.is_symmetric ? in : Span(own);
    group_.all_reduce(std::as_bytes(in), std::as_writable_bytes(out), kType, ReduceOp::kSum);
    check(out, [&](size_t i) { return sum_of(step_, group_.world_size(), i); });
    if (!step_.is_symmetric) check_input();
  }

  void all_gather() {
    const Span in = make_input(step_.count);
    Values out(step_.count * world_size());
    group_.all_gather(std::as_bytes(in), bytes_of(out), kType);
    check_gathered(out);
  }

  void reduce_scatter() {
    const Span in = make_input(step_.count * world_size());
    Values out(step_.count);
    group_.reduce_scatter(std::as_bytes(in), bytes_of(out), kType, ReduceOp::kSum);
    check(out,
          [&](size_t i) { return sum_of(step_, group_.world_size(), me() * step_.count + i); });
    check_input();
  }

  void broadcast() {
    const Span data = make_input(step_.count);
    group_.broadcast(std::as_writable_bytes(data), kType, step_.root);
    check(data, [&](size_t i) { return value_of(step_, step_.root, i); });
  }

  void reduce() {
    const Span in = make_input(step_.count);
    const bool is_in_place = step_.is_symmetric;
    Values own(is_root() && !is_in_place ? step_.count : 0);
    const Span out = is_root() && is_in_place ? in : Span(own);
    group_.reduce(std::as_bytes(in), std::as_writable_bytes(out), kType, ReduceOp::kSum,
                  step_.root);
    check(out, [&](size_t i) { return sum_of(step_, group_.world_size(), i); });
    if (!is_root()) check_input();
  }

  void gather() {
    const Span in = make_input(step_.count);
    Values out(is_root() ? step_.count * world_size() : 0);
    group_.gather(std::as_bytes(in), bytes_of(out), kType, step_.root);
    check_gathered(out);
  }

  void scatter() {
    const Span in = make_input(is_root() ? step_.count * world_size() : 0);
    Values out(step_.count);
    group_.scatter(std::as_bytes(in), bytes_of(out), kType, step_.root);
    check(out, [&](size_t i) { return value_of(step_, step_.root, me() * step_.count + i); });
    check_input();
  }

  void all_to_all() {
    const size_t slice = 1 + step_.count / world_size();
    const Span in = make_input(slice * world_size());
    Values out(in.size());
    group_.all_to_all(std::as_bytes(in), bytes_of(out), kType);
    check(out, [&](size_t i) {
      return value_of(step_, static_cast<int>(i / slice), me() * slice + i % slice);
    });
    check_input();
  }

  void all_to_all_v() {
    const int num_ranks = group_.world_size();
    const int rank = group_.rank().value;
    std::vector<uint64_t> sent;
    std::vector<uint64_t> received;
    Values expected;
    for (int other = 0; other < num_ranks; ++other) {
      sent.push_back(slice_count(rank, other));
      received.push_back(slice_count(other, rank));
      size_t offset = 0;
      for (int to = 0; to < rank; ++to) offset += slice_count(other, to);
      for (size_t i = 0; i < received.back(); ++i) {
        expected.push_back(value_of(step_, other, offset + i));
      }
    }
    size_t num_sent = 0;
    for (const uint64_t count : sent) num_sent += count;
    const Span in = make_input(num_sent);
    Values out(expected.size());
    group_.all_to_all_v(std::as_bytes(in), bytes_of(out), kType, {sent, received});
    check(out, [&](size_t i) { return expected[i]; });
    check_input();
  }

  void all_gather_v() {
    std::vector<uint64_t> counts;
    Values expected;
    for (int rank = 0; rank < group_.world_size(); ++rank) {
      counts.push_back(slice_count(rank, 0));
      for (size_t i = 0; i < counts.back(); ++i) expected.push_back(value_of(step_, rank, i));
    }
    const Span in = make_input(counts[me()]);
    Values out(expected.size());
    group_.all_gather_v(std::as_bytes(in), bytes_of(out), kType, counts);
    check(out, [&](size_t i) { return expected[i]; });
    check_input();
  }

  void reduce_scatter_v() {
    std::vector<uint64_t> counts;
    size_t total = 0;
    size_t begin = 0;
    for (int rank = 0; rank < group_.world_size(); ++rank) {
      if (rank == group_.rank()) begin = total;
      counts.push_back(slice_count(rank, 0));
      total += counts.back();
    }
    const Span in = make_input(total);
    Values out(counts[me()]);
    group_.reduce_scatter_v(std::as_bytes(in), bytes_of(out), kType, ReduceOp::kSum, counts);
    check(out, [&](size_t i) { return sum_of(step_, group_.world_size(), begin + i); });
    check_input();
  }

 private:
  static Bytes bytes_of(Values& values) { return std::as_writable_bytes(std::span(values)); }

  size_t world_size() const { return static_cast<size_t>(group_.world_size()); }
  size_t me() const { return static_cast<size_t>(group_.rank().value); }
  bool is_root() const { return group_.rank() == step_.root; }

  // Part size for operations with uneven parts; every fourth is empty.
  size_t slice_count(int from, int to) const {
    Random random(step_.seed ^ static_cast<uint64_t>(from * group_.world_size() + to));
    return random.below(4) == 0 ? 0 : random.below(2 * step_.count / world_size() + 2);
  }

  Span make_input(size_t count) {
    if (step_.is_symmetric) {
      input_ = Span(reinterpret_cast<int32_t*>(symmetric_.data()), count);
    } else {
      own_.resize(count);
      input_ = own_;
    }
    for (size_t i = 0; i < count; ++i) input_[i] = value_of(step_, group_.rank().value, i);
    return input_;
  }

  template <class Formula>
  void check(std::span<const int32_t> values, const Formula& formula) const {
    for (size_t i = 0; i < values.size(); ++i) {
      const int32_t expected = formula(i);
      if (values[i] == expected) continue;
      throw Error(ErrorCode::kInternal,
                  format("{}: element {} of {} is {}, expected {}", to_string(step_.kind), i,
                         values.size(), values[i], expected));
    }
  }

  void check_gathered(const Values& out) const {
    check(out, [&](size_t i) {
      return value_of(step_, static_cast<int>(i / step_.count), i % step_.count);
    });
    check_input();
  }

  // What is only read keeps its values.
  void check_input() const {
    check(input_, [&](size_t i) { return value_of(step_, group_.rank().value, i); });
  }

  Communicator& group_;
  const Step& step_;
  const Bytes symmetric_;
  Values own_;
  Span input_;
};

}  // namespace

std::string_view to_string(Step::Kind kind) {
  constexpr std::array<std::string_view, Step::kNumKinds> kNames = {
      "all_reduce",   "all_gather",       "reduce_scatter", "broadcast",  "barrier",
      "reduce",       "gather",           "scatter",        "all_to_all", "all_to_all_v",
      "all_gather_v", "reduce_scatter_v", "two groups",     "messages"};
  return kNames[static_cast<size_t>(kind)];
}

size_t symmetric_bytes(int world_size) {
  return (kMaxStepCount + 2) * static_cast<size_t>(std::max(world_size, 2)) * size_of(kType);
}

void run_collective(Communicator& group, const Step& step, Bytes symmetric) {
  Part part(group, step, symmetric);
  switch (step.kind) {
    case Step::Kind::kAllReduce:
      return part.all_reduce();
    case Step::Kind::kAllGather:
      return part.all_gather();
    case Step::Kind::kReduceScatter:
      return part.reduce_scatter();
    case Step::Kind::kBroadcast:
      return part.broadcast();
    case Step::Kind::kBarrier:
      return group.barrier();
    case Step::Kind::kReduce:
      return part.reduce();
    case Step::Kind::kGather:
      return part.gather();
    case Step::Kind::kScatter:
      return part.scatter();
    case Step::Kind::kAllToAll:
      return part.all_to_all();
    case Step::Kind::kAllToAllV:
      return part.all_to_all_v();
    case Step::Kind::kAllGatherV:
      return part.all_gather_v();
    case Step::Kind::kReduceScatterV:
      return part.reduce_scatter_v();
    case Step::Kind::kTwoGroups:
    case Step::Kind::kMessages:
      throw Error(ErrorCode::kInternal, "messages are no collective");
  }
}

}  // namespace cadre::testing
