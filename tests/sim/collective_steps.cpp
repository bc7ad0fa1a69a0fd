#include "collective_steps.h"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/core/collective_call.h"

namespace cadre::testing {
namespace {

constexpr DType kType = DType::kInt32;

using Values = std::vector<int32_t>;
using Span = std::span<int32_t>;

// Returns element `index` of a rank's input of a collective.
int32_t value_of(const Step& step, int rank, size_t index) {
  return static_cast<int32_t>(step.seed % 1000) + 100'003 * rank +
         static_cast<int32_t>(index % 8629);
}

int32_t sum_of(const Step& step, int world_size, size_t index) {
  int32_t sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += value_of(step, rank, index);
  return sum;
}

// The OpKind of each Step::Kind, in the order of Step::Kind. The last two kinds are no collectives.
constexpr std::array<OpKind, Step::kNumKinds - 2> kOpKinds = {
    OpKind::kAllReduce, OpKind::kAllGather, OpKind::kReduceScatter, OpKind::kBroadcast,
    OpKind::kBarrier,   OpKind::kReduce,    OpKind::kGather,        OpKind::kScatter,
    OpKind::kAllToAll,  OpKind::kAllToAllV, OpKind::kAllGatherV,    OpKind::kReduceScatterV};

CollectiveCall call_of(const Step& step, int world_size) {
  const auto num_ranks = static_cast<uint64_t>(world_size);
  const OpKind kind = kOpKinds[static_cast<size_t>(step.kind)];
  return {.kind = kind,
          .dtype = kType,
          .count = kind == OpKind::kAllToAll ? 1 + step.count / num_ranks : step.count,
          .root = step.root,
          .reduction = ReduceOp::kSum,
          .world_size = world_size,
          // On average, one part in four is empty.
          .parts = [&step, num_ranks](int from, int to) -> uint64_t {
            Random random(step.seed ^
                          (static_cast<uint64_t>(from) * num_ranks + static_cast<uint64_t>(to)));
            return random.below(4) == 0 ? 0 : random.below(2 * step.count / num_ranks + 2);
          }};
}

void check(const Step& step, Span values, size_t index, int32_t expected) {
  if (values[index] == expected) return;
  throw Error(ErrorCode::kInternal,
              format("{}: element {} of {} is {}, expected {}", to_string(step.kind), index,
                     values.size(), values[index], expected));
}

void check_output(const CollectiveCall& call, const Step& step, Rank rank, Span values) {
  size_t index = 0;
  for (const auto& [from, begin, count] : call.output(rank)) {
    for (uint64_t i = begin; i < begin + count; ++i) {
      check(step, values, index++,
            from ? value_of(step, *from, i) : sum_of(step, call.world_size, i));
    }
  }
}

}  // namespace

std::string_view to_string(Step::Kind kind) {
  if (kind == Step::Kind::kTwoGroups) return "two groups";
  if (kind == Step::Kind::kMessages) return "messages";
  return to_string(kOpKinds[static_cast<size_t>(kind)]);
}

size_t symmetric_bytes(int world_size) {
  return (kMaxStepCount + 2) * static_cast<size_t>(std::max(world_size, 2)) * size_of(kType);
}

void run_collective(Communicator& group, const Step& step, Bytes symmetric) {
  const Rank rank = group.rank();
  const CollectiveCall call = call_of(step, group.world_size());
  const size_t num_input = call.num_input(rank);
  const size_t num_output = call.num_output(rank);
  const bool is_reduced_in_place =
      step.is_symmetric && num_output > 0 &&
      (call.kind == OpKind::kAllReduce || call.kind == OpKind::kReduce);
  const bool is_in_place = is_reduced_in_place || call.kind == OpKind::kBroadcast;
  Values own_input(step.is_symmetric ? 0 : num_input);
  Values own_output(is_in_place ? 0 : num_output);
  const Span input = step.is_symmetric
                         ? Span(reinterpret_cast<int32_t*>(symmetric.data()), num_input)
                         : Span(own_input);
  const Span output = is_in_place ? input : Span(own_output);
  for (size_t i = 0; i < num_input; ++i) input[i] = value_of(step, rank.value, i);
  group.run(call.collective(rank, std::as_bytes(input), std::as_writable_bytes(output)));
  check_output(call, step, rank, output);
  if (is_in_place) return;
  // A collective must not change its input.
  for (size_t i = 0; i < num_input; ++i) check(step, input, i, value_of(step, rank.value, i));
}

}  // namespace cadre::testing
