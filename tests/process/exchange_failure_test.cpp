// Ranks, as processes, that call something else than the others or leave early in reduce, gather,
// scatter and all_to_all: what each rank says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/base/format.h"
#include "cadre/collective/op.h"
#include "cadre/testing/leftovers.h"
#include "job.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using ::testing::AnyOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::JobOptions;
using testing::mask;
using testing::RankContext;
using testing::require;
using ::testing::StartsWith;

constexpr int kWorldSize = 3;
constexpr int kOddOne = 1;

// What one rank calls.
struct Args {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kFloat32;
  size_t count = 6;  // of one part
  Rank root = 0;
};

// Parts of args.count for everybody; dtypes here have 4 bytes.
void call(Communicator& group, const Args& args) {
  std::vector<std::byte> small(args.count * 4);
  std::vector<std::byte> large(small.size() * kWorldSize);
  std::vector<std::byte> other(large.size());
  const std::vector<uint64_t> counts(kWorldSize, args.count);
  switch (args.kind) {
    case OpKind::kReduce:
      return group.reduce(small, small, args.dtype, ReduceOp::kSum, args.root);
    case OpKind::kGather:
      return group.gather(small, large, args.dtype, args.root);
    case OpKind::kScatter:
      return group.scatter(large, small, args.dtype, args.root);
    case OpKind::kAllToAll:
      return group.all_to_all(large, other, args.dtype);
    case OpKind::kAllToAllV:
      return group.all_to_all_v(large, other, args.dtype, {counts, counts});
    default:
      return group.barrier();
  }
}

// How messages write the call.
std::string text_of(const Args& args) {
  const OpDescriptor descriptor{.kind = args.kind,
                                .dtype = args.dtype,
                                .root = args.root,
                                .count = args.kind == OpKind::kAllToAllV  ? 0
                                         : args.kind == OpKind::kAllToAll ? args.count * kWorldSize
                                                                          : args.count};
  return descriptor.to_string();
}

bool has_root(OpKind kind) {
  return kind == OpKind::kReduce || kind == OpKind::kGather || kind == OpKind::kScatter;
}

struct Case {
  OpKind kind;
  TransportChoice transport;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return format("{}_{}", info.param.kind,
                info.param.transport == TransportChoice::kTcp ? "tcp" : "host");
}

class ExchangeFailureTest : public ::testing::TestWithParam<Case> {
 protected:
  // Every rank runs `body` in a group of its own for each of `num_groups`, one after the other, and
  // hands back what was thrown, one masked text behind the other.
  std::vector<std::vector<std::string>> run(
      int num_groups, const std::function<void(Communicator&, int group_index)>& body) {
    const testing::Resources before = testing::count_resources();
    JobOptions options{.world_size = kWorldSize};
    options.processes.time_limit = seconds(60);
    const auto result =
        testing::run_job(options, [&](RankContext& context, const Membership& membership) {
          for (int i = 0; i < num_groups; ++i) {
            Membership own = membership;
            own.round = static_cast<uint64_t>(i) + 1;
            const auto group = testing::connect(
                context, own, {.timeout = seconds(20), .transport = GetParam().transport});
            context.output += mask(testing::failure_of([&] { body(*group, i); })) + kEnd;
            group->close(context.system.deadline_in(seconds(5)));
          }
        });
    EXPECT_TRUE(result.ok()) << result.failures();
    EXPECT_EQ(testing::leftovers_since(before), "");
    std::vector<std::vector<std::string>> texts;
    for (const auto& rank : result.ranks) texts.push_back(split(rank.output));
    return texts;
  }

 private:
  static constexpr char kEnd = '\f';

  static std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts(1);
    for (const char c : text) {
      if (c == kEnd) {
        parts.emplace_back();
      } else {
        parts.back() += c;
      }
    }
    parts.pop_back();
    return parts;
  }
};

// Rank 1 differs in the operation, the count, the dtype or the root. A rank that needs nothing from
// it may be one operation further when it hears of it.
TEST_P(ExchangeFailureTest, EveryRankSaysWhoCalledWhat) {
  const Args usual{.kind = GetParam().kind};
  std::vector<Args> odd = {{.kind = OpKind::kBarrier},
                           {.kind = usual.kind, .count = 5},
                           {.kind = usual.kind, .dtype = DType::kInt32}};
  if (has_root(usual.kind)) odd.push_back({.kind = usual.kind, .root = kOddOne});
  const auto texts = run(static_cast<int>(odd.size()), [&](Communicator& group, int i) {
    group.barrier();
    call(group, group.rank() == kOddOne ? odd[static_cast<size_t>(i)] : usual);
    group.barrier();
    group.barrier();
  });
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    ASSERT_EQ(texts[rank].size(), odd.size());
    for (size_t i = 0; i < odd.size(); ++i) {
      const std::string& text = texts[rank][i];
      SCOPED_TRACE(text);
      EXPECT_THAT(text, StartsWith("kInvalidArgument: "));
      EXPECT_THAT(text, HasSubstr(" #N on group \"world\" failed after N s on rank "));
      EXPECT_THAT(text, EndsWith(". Remedy: let all ranks call the same operations in the same "
                                 "order."));
      if (usual.kind == OpKind::kAllToAllV && odd[i].count != usual.count) {
        EXPECT_THAT(text,
                    HasSubstr("\n  the ranks disagree: rank 0 (HOST, pid N) sends float32 x 6 "
                              "to rank 1 (HOST, pid N), which expects 5."));
        continue;
      }
      EXPECT_THAT(text, HasSubstr("\n  the ranks disagree: rank "));
      EXPECT_THAT(text, HasSubstr(format("rank 1 (HOST, pid N) called {} as #N", text_of(odd[i]))));
      EXPECT_THAT(text, AnyOf(HasSubstr(format("called {} as #N", text_of(usual))),
                              HasSubstr("called barrier() as #N")));
    }
  }
}

TEST_P(ExchangeFailureTest, ARankThatEndsItsLoopEarlyIsSaidToHaveLeft) {
  constexpr int kLeaver = 2;
  const auto texts = run(1, [&](Communicator& group, int) {
    const int num_steps = group.rank() == kLeaver ? 2 : 4;
    for (int step = 0; step < num_steps; ++step) call(group, {.kind = GetParam().kind});
    if (group.rank() != kLeaver) group.barrier();
  });
  EXPECT_EQ(texts[kLeaver][0], "");
  for (const size_t rank : {size_t{0}, size_t{1}}) {
    EXPECT_THAT(texts[rank][0],
                AnyOf(StartsWith("kPeerLost: " + std::string(to_string(GetParam().kind)) + " #N"),
                      StartsWith("kPeerLost: barrier #N")));
    EXPECT_THAT(texts[rank][0],
                EndsWith("\n  rank 2 (HOST, pid N) left the group after #N (it ended its loop "
                         "early?). Remedy: rebuild the group."));
  }
}

INSTANTIATE_TEST_SUITE_P(Host, ExchangeFailureTest,
                         ::testing::Values(Case{OpKind::kReduce, TransportChoice::kAuto},
                                           Case{OpKind::kGather, TransportChoice::kAuto},
                                           Case{OpKind::kScatter, TransportChoice::kAuto},
                                           Case{OpKind::kAllToAll, TransportChoice::kAuto},
                                           Case{OpKind::kAllToAllV, TransportChoice::kAuto}),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Tcp, ExchangeFailureTest,
                         ::testing::Values(Case{OpKind::kReduce, TransportChoice::kTcp},
                                           Case{OpKind::kGather, TransportChoice::kTcp},
                                           Case{OpKind::kScatter, TransportChoice::kTcp},
                                           Case{OpKind::kAllToAll, TransportChoice::kTcp},
                                           Case{OpKind::kAllToAllV, TransportChoice::kTcp}),
                         name_of);

}  // namespace
}  // namespace cadre
