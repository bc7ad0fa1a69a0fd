// Tests ranks, as processes, of which one makes a different call than the others or leaves early:
// for every operation, with every engine, in the world and in a subgroup. The complete error
// messages of all ranks are compared, with numbers masked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/comm/messages/message_header.h"
#include "cadre/testing/core/collective_call.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/on_host.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/seeds.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using ::testing::AnyOfArray;
using testing::JobOptions;
using testing::mask;
using testing::RankContext;

constexpr int kWorldSize = 3;
constexpr int kOddOne = 1;
constexpr int kLeaver = 2;
constexpr int kTag = 7;
constexpr Duration kTimeout = seconds(20);
// All ranks must have their errors within this time, which includes the barriers around the calls.
constexpr Duration kLimit = seconds(5);
constexpr const char* kMatching =
    "let each send have one recv with its tag, number of elements and dtype";
constexpr const char* kRestart = "restart the job or call rejoin()";

// Describes the call that one rank makes.
struct Args {
  OpKind kind = OpKind::kBarrier;
  DType dtype = DType::kFloat32;
  size_t count = 6;  // the number of elements of one rank's part
  Rank root = 0;
  int64_t num_rows = 0;  // if 0, the tensor has one dimension
};

// Returns the number of elements of the tensor whose shape the ranks compare.
uint64_t num_elements_of(const Args& args) {
  return args.kind == OpKind::kAllToAll ? args.count * kWorldSize : args.count;
}

std::vector<int64_t> sizes_of(const Args& args) {
  const auto num_elements = static_cast<int64_t>(num_elements_of(args));
  if (args.num_rows == 0) return {num_elements};
  return {args.num_rows, num_elements / args.num_rows};
}

// Makes the call. All dtypes of these tests have 4 bytes.
void call(Communicator& group, const Args& args) {
  std::vector<std::byte> message(args.count * 4);
  if (args.kind == OpKind::kSend) return group.send(message, args.dtype, args.root, kTag);
  if (args.kind == OpKind::kRecv) return group.recv(message, args.dtype, args.root, kTag);
  const testing::CollectiveCall call{.kind = args.kind,
                                     .dtype = args.dtype,
                                     .count = args.count,
                                     .root = args.root,
                                     .reduction = ReduceOp::kSum,
                                     .world_size = kWorldSize};
  const std::vector<std::byte> in(call.num_input(group.rank()) * 4);
  std::vector<std::byte> out(call.num_output(group.rank()) * 4);
  Collective collective = call.collective(group.rank(), in, out);
  const std::vector<int64_t> sizes = sizes_of(args);
  if (args.kind != OpKind::kAllToAllV && args.kind != OpKind::kBarrier) collective.shape = sizes;
  group.run(std::move(collective));
}

bool has_root(OpKind kind) {
  return kind == OpKind::kBroadcast || kind == OpKind::kReduce || kind == OpKind::kGather ||
         kind == OpKind::kScatter;
}

// Returns the text by which error messages describe the call.
std::string text_of(const Args& args) {
  OpDescriptor descriptor{.kind = args.kind, .dtype = args.dtype, .root = args.root};
  if (args.kind != OpKind::kAllToAllV) {
    descriptor.count = num_elements_of(args);
    descriptor.shape = PackedShape(sizes_of(args));
  }
  return descriptor.to_string();
}

std::string name_of_rank(int rank) {
  return format("rank {} (HOST, pid N)", rank);
}

// Returns all messages that one rank may throw for one cause. Which one depends on whether the rank
// notices the failure inside one of these operations or between two of them.
std::vector<std::string> texts_of(std::string_view code, int rank,
                                  const std::vector<OpKind>& operations, const std::string& cause,
                                  std::string_view remedy) {
  std::vector<std::string> texts;
  const std::string self = name_of_rank(rank);
  for (const OpKind kind : operations) {
    texts.push_back(format("{}: {} #N on group \"world\" failed after N s on {}\n  {}. Remedy: {}.",
                           code, kind, self, cause, remedy));
    texts.push_back(format("{}: group \"world\" failed on {} after {} #N\n  {}. Remedy: {}.", code,
                           self, kind, cause, remedy));
  }
  return texts;
}

std::string cause_in(const std::string& text) {
  const size_t at = text.find("\n  ");
  return at == std::string::npos ? text : text.substr(at);
}

// The engines of the groups: the host engine, the net engine, and the hierarchical engine on two
// pretended hosts.
enum class Engine { kHost, kTcp, kTwoHosts };

std::string_view to_string(Engine engine) {
  return engine == Engine::kHost ? "host" : engine == Engine::kTcp ? "tcp" : "two_hosts";
}

struct Case {
  OpKind kind;
  Engine engine;
  bool is_subgroup = false;

  // The ranks outside of the subgroup have the lowest numbers, so that a rank's number in the
  // subgroup differs from that in the world.
  int num_outsiders() const { return is_subgroup ? 1 : 0; }
  // Two ranks of the world are on host 0. So in the world rank 1 of the group shares its host with
  // rank 0, and in the subgroup with rank 2.
  std::optional<int> host_of(Rank world_rank) const {
    return engine == Engine::kTwoHosts ? std::optional(world_rank.value / 2) : std::nullopt;
  }
  CommunicatorOptions options() const {
    CommunicatorOptions options;
    options.timeout = kTimeout;
    if (engine == Engine::kTcp) options.transport = TransportChoice::kTcp;
    if (engine == Engine::kTwoHosts) options.listen_host = "127.0.0.1";
    return options;
  }
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return format("{}_{}{}", info.param.kind, to_string(info.param.engine),
                info.param.is_subgroup ? "_subgroup" : "");
}

// An operation of another group that is in flight while the ranks make different calls. It must
// succeed, because only the group with the different calls may fail.
class Bystander {
 public:
  Bystander(RankContext& context, Communicator& world)
      : values_(1 << 18, 1),
        group_(split(world, {.color = 0, .name = "bystander"},
                     context.system.deadline_in(seconds(10)))) {
    const Bytes bytes = std::as_writable_bytes(std::span(values_));
    work_.emplace(group_->all_reduce_async(bytes, bytes, DType::kInt32, ReduceOp::kSum));
  }
  void expect_sum() {
    work_->wait();
    testing::require(values_.front() == group_->world_size() && values_.back() == values_.front(),
                     "the sum of the other group");
  }

 private:
  std::vector<int32_t> values_;
  std::unique_ptr<Communicator> group_;
  std::optional<Work> work_;
};

class DisagreementTest : public ::testing::TestWithParam<Case> {
 protected:
  // Runs `body` on every rank, in `num_groups` new groups one after the other. Returns for each
  // rank the masked messages of its errors, one for each group. Sets culprits_.
  std::vector<std::vector<std::string>> run(
      size_t num_groups, const std::function<void(Communicator&, size_t group_index)>& body) {
    const testing::Resources before = testing::count_resources();
    JobOptions options{.world_size = kWorldSize + GetParam().num_outsiders()};
    options.processes.time_limit = seconds(60);
    const auto result =
        testing::run_job(options, [&](RankContext& context, const Membership& membership) {
          testing::run_on_host(context, GetParam().host_of(context.rank), [&](RankContext& placed) {
            for (size_t i = 0; i < num_groups; ++i) {
              Membership own = membership;
              own.round = i + 1;
              run_once(placed, own, [&](Communicator& group) { body(group, i); });
            }
          });
        });
    EXPECT_TRUE(result.ok()) << result.failures();
    EXPECT_EQ(testing::leftovers_since(before), "");
    std::vector<std::vector<std::string>> texts;
    culprits_.clear();
    for (size_t i = static_cast<size_t>(GetParam().num_outsiders()); i < result.ranks.size(); ++i) {
      texts.emplace_back();
      culprits_.emplace_back();
      const std::vector<std::string> parts = parts_of(result.ranks[i].output);
      for (size_t k = 0; k < parts.size(); ++k) {
        (k % 2 == 0 ? texts : culprits_).back().push_back(parts[k]);
      }
    }
    return texts;
  }

  // The culprits of these errors, in the same order; "none" for an error without a culprit.
  std::vector<std::vector<std::string>> culprits_;

 private:
  static constexpr char kEnd = '\f';

  void run_once(RankContext& context, const Membership& membership,
                const std::function<void(Communicator&)>& body) const {
    const auto world = testing::connect(context, membership, GetParam().options());
    std::unique_ptr<Communicator> subgroup;
    std::optional<Bystander> bystander;
    if (GetParam().is_subgroup) {
      SplitOptions choice{.name = "world"};
      if (context.rank >= GetParam().num_outsiders()) choice.color = 1;
      subgroup = split(*world, choice, context.system.deadline_in(seconds(10)));
      bystander.emplace(context, *world);
    }
    if (subgroup != nullptr || !GetParam().is_subgroup) {
      Communicator& group = subgroup != nullptr ? *subgroup : *world;
      const TimePoint begin = context.system.now();
      std::string culprit;
      const std::string text = testing::failure_of([&] {
        try {
          body(group);
        } catch (const Error& error) {
          const auto& rank = error.details().culprit;
          culprit = rank ? format("{}", *rank) : "none";
          throw;
        }
      });
      context.output += testing::without_world_ranks(mask(text), GetParam().num_outsiders());
      context.output += kEnd + culprit + kEnd;
      testing::require(context.system.now() - begin < kLimit,
                       "the errors come long before the deadline");
      group.close(context.system.deadline_in(seconds(5)));
    }
    if (bystander) bystander->expect_sum();
    bystander.reset();
    world->close(context.system.deadline_in(seconds(5)));
  }

  static std::vector<std::string> parts_of(const std::string& text) {
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

// The calls that rank 1 makes in place of the usual call. `what` says what differs.
struct Oddity {
  const char* what;
  std::vector<Args> calls;
};

std::vector<Oddity> oddities_of(const Args& usual) {
  const Args other{.kind =
                       usual.kind == OpKind::kAllGather ? OpKind::kAllReduce : OpKind::kAllGather};
  std::vector<Oddity> oddities = {{"operation", {other, other}}};
  if (usual.kind == OpKind::kBarrier) return oddities;
  oddities.push_back({"order", {{.kind = OpKind::kBarrier}, usual}});
  oddities.push_back({"count", {{.kind = usual.kind, .count = 5}}});
  oddities.push_back({"dtype", {{.kind = usual.kind, .dtype = DType::kInt32}}});
  // The shapes of all_to_all_v are not compared as a whole, because the sizes of the parts are
  // compared pair by pair.
  if (usual.kind != OpKind::kAllToAllV) {
    oddities.push_back({"shape", {{.kind = usual.kind, .num_rows = 2}}});
  }
  if (has_root(usual.kind)) oddities.push_back({"root", {{.kind = usual.kind, .root = kOddOne}}});
  return oddities;
}

// Returns the possible causes in the messages. A cause names two ranks, one of which is rank 1. A
// rank that needs no data from rank 1 may already be in the barrier after the operation, which then
// is its call in the message.
std::vector<std::string> causes_of(const Args& usual, const Oddity& oddity) {
  if (usual.kind == OpKind::kAllToAllV && oddity.what == std::string("count")) {
    return {format("the ranks disagree: {} sends float32 x 6 to {}, which expects 5",
                   name_of_rank(0), name_of_rank(kOddOne))};
  }
  const auto called = [](int rank, const std::string& what) {
    return format("{} called {} as #N", name_of_rank(rank), what);
  };
  std::vector<std::string> causes;
  const std::string odd = called(kOddOne, text_of(oddity.calls.front()));
  for (const std::string& what : {text_of(usual), std::string("barrier()")}) {
    causes.push_back(format("the ranks disagree: {}, {}", called(0, what), odd));
    causes.push_back(format("the ranks disagree: {}, {}", odd, called(2, what)));
  }
  return causes;
}

// Returns the remedy in the message. If a rank is already in the barrier after the operation, the
// message compares the barrier with the call of rank 1, so the remedy is that for different
// operations.
std::string remedy_of(const Oddity& oddity, const std::string& cause) {
  if (cause.find(" sends ") != std::string::npos) {
    return "let each rank expect from every other rank what that rank sends to it: output split "
           "sizes are compared with the input split sizes of the senders";
  }
  const std::string_view what = oddity.what;
  if (what == "operation" || what == "order" || cause.find("barrier()") != std::string::npos) {
    return "let all ranks call the same operations in the same order";
  }
  const std::string_view same = what == "dtype"  ? "tensors of one dtype"
                                : what == "root" ? "the same root"
                                                 : "tensors of one shape";
  return format("pass {} on all ranks, unless a rank has left out an earlier call", same);
}

class OperationDisagreementTest : public DisagreementTest {};

TEST_P(OperationDisagreementTest, EveryRankGivesTheSameExplanation) {
  const Args usual{.kind = GetParam().kind};
  const std::vector<Oddity> oddities = oddities_of(usual);
  const auto texts = run(oddities.size(), [&](Communicator& group, size_t i) {
    group.barrier();
    const std::vector<Args> usually = {usual, {.kind = OpKind::kBarrier}};
    const bool is_odd = group.rank() == kOddOne;
    for (const Args& args : is_odd ? oddities[i].calls : usually) call(group, args);
    for (int more = 0; more < 3; ++more) group.barrier();
  });
  for (size_t i = 0; i < oddities.size(); ++i) {
    SCOPED_TRACE(oddities[i].what);
    const std::vector<OpKind> operations = {usual.kind, oddities[i].calls.front().kind,
                                            OpKind::kBarrier};
    for (int rank = 0; rank < kWorldSize; ++rank) {
      const std::string& text = texts[static_cast<size_t>(rank)][i];
      std::vector<std::string> golden;
      for (const std::string& cause : causes_of(usual, oddities[i])) {
        const auto more =
            texts_of("kInvalidArgument", rank, operations, cause, remedy_of(oddities[i], cause));
        golden.insert(golden.end(), more.begin(), more.end());
      }
      EXPECT_THAT(text, AnyOfArray(golden));
      EXPECT_EQ(cause_in(text), cause_in(texts[0][i])) << "rank " << rank;
      // The culprit is the higher rank of the two; if the sizes of a part differ, it is the part's
      // sender.
      const bool is_of_part = text.find(" sends ") != std::string::npos;
      const bool has_rank_0 = cause_in(text).find("rank 0 ") != std::string::npos;
      EXPECT_EQ(culprits_[static_cast<size_t>(rank)][i], is_of_part ? "0" : has_rank_0 ? "1" : "2");
    }
  }
}

// A rank that leaves the group early gets no error. In the errors of the others, a separate
// sentence says that it has left.
TEST_P(OperationDisagreementTest, ARankThatEndsItsLoopEarlyIsSaidToHaveLeft) {
  const auto texts = run(1, [&](Communicator& group, size_t) {
    group.barrier();
    const int num_steps = group.rank() == kLeaver ? 2 : 4;
    for (int step = 0; step < num_steps; ++step) call(group, {.kind = GetParam().kind});
    if (group.rank() != kLeaver) group.barrier();
  });
  EXPECT_EQ(texts[kLeaver][0], "");
  const std::string cause =
      name_of_rank(kLeaver) + " left the group after #N (it ended its loop early?)";
  for (const int rank : {0, 1}) {
    EXPECT_THAT(texts[static_cast<size_t>(rank)][0],
                AnyOfArray(texts_of("kPeerLost", rank, {GetParam().kind, OpKind::kBarrier}, cause,
                                    kRestart)));
  }
}

// CTest runs all cases in the world, but only the chosen share of those in a subgroup.
std::vector<Case> on_all_engines(const std::vector<OpKind>& kinds) {
  std::vector<Case> cases;
  std::vector<Case> in_subgroup;
  for (const Engine engine : {Engine::kHost, Engine::kTcp, Engine::kTwoHosts}) {
    for (const OpKind kind : kinds) {
      cases.push_back({kind, engine});
      in_subgroup.push_back({kind, engine, true});
    }
  }
  std::ranges::copy(testing::share_of(in_subgroup), std::back_inserter(cases));
  return cases;
}

INSTANTIATE_TEST_SUITE_P(
    All, OperationDisagreementTest,
    ::testing::ValuesIn(on_all_engines({OpKind::kBroadcast, OpKind::kAllReduce, OpKind::kReduce,
                                        OpKind::kAllGather, OpKind::kReduceScatter, OpKind::kGather,
                                        OpKind::kScatter, OpKind::kAllToAll, OpKind::kAllToAllV,
                                        OpKind::kBarrier})),
    name_of);

// Tests send and recv: if the two ranks of a message make different calls, all ranks of the group
// get an error.
class MessageDisagreementTest : public DisagreementTest {};

TEST_P(MessageDisagreementTest, EveryRankGivesTheSameExplanation) {
  // So many elements that send() of the message blocks until it is received.
  constexpr size_t kLong = MessageHeader::kMaxEagerBytes;
  struct OddMessage {
    DType dtype;
    size_t sent;
    size_t received;
  };
  const std::vector<OddMessage> oddities = {
      {DType::kFloat32, 6, 5}, {DType::kInt32, 6, 6}, {DType::kFloat32, kLong, kLong - 1}};
  const auto texts = run(oddities.size(), [&](Communicator& group, size_t i) {
    group.barrier();
    const OddMessage& odd = oddities[i];
    if (group.rank() == 0) call(group, {.kind = OpKind::kSend, .count = odd.sent, .root = 1});
    if (group.rank() == 1) {
      call(group, {.kind = OpKind::kRecv, .dtype = odd.dtype, .count = odd.received, .root = 0});
    }
    group.barrier();
  });
  for (size_t i = 0; i < oddities.size(); ++i) {
    const OddMessage& odd = oddities[i];
    const std::string cause = format(
        "tag {}: the ranks disagree: {} sent {} bytes of float32, {} receives {} bytes of {}", kTag,
        name_of_rank(0), 4 * odd.sent, name_of_rank(1), 4 * odd.received, odd.dtype);
    for (int rank = 0; rank < kWorldSize; ++rank) {
      EXPECT_THAT(
          texts[static_cast<size_t>(rank)][i],
          AnyOfArray(texts_of("kInvalidArgument", rank,
                              {OpKind::kSend, OpKind::kRecv, OpKind::kBarrier}, cause, kMatching)));
    }
  }
}

TEST_P(MessageDisagreementTest, ARankThatEndsItsLoopEarlyIsSaidToHaveLeft) {
  constexpr size_t kLong = MessageHeader::kMaxEagerBytes;
  const OpKind kind = GetParam().kind;
  const auto texts = run(1, [&](Communicator& group, size_t) {
    group.barrier();
    if (group.rank() == kLeaver) return;
    call(group, {.kind = kind, .count = kLong, .root = kLeaver});
  });
  EXPECT_EQ(texts[kLeaver][0], "");
  for (const int rank : {0, 1}) {
    const std::string left =
        name_of_rank(kLeaver) + " left the group after #N (it ended its loop early?)";
    EXPECT_THAT(texts[static_cast<size_t>(rank)][0],
                AnyOfArray(texts_of("kPeerLost", rank, {kind, OpKind::kBarrier},
                                    format("tag {}: {}", kTag, left), kRestart)));
  }
}

INSTANTIATE_TEST_SUITE_P(All, MessageDisagreementTest,
                         ::testing::ValuesIn(on_all_engines({OpKind::kSend, OpKind::kRecv})),
                         name_of);

// Two hosts of two ranks make different calls. A host whose ranks only send data goes on to its
// next operation, where it waits inside the host; so the other host must learn of its call before.
TEST(HostsDisagreementTest, HostsThatMakeDifferentCallsNameThemLongBeforeTheDeadline) {
  struct Calls {
    OpKind on_first_host;
    Rank root;  // rank 1 and rank 3 are not the first of their hosts
    OpKind on_second_host;
    Rank other_root;
  };
  const std::vector<Calls> all = {
      {OpKind::kGather, 1, OpKind::kAllReduce, 0},  {OpKind::kGather, 1, OpKind::kBroadcast, 2},
      {OpKind::kGather, 1, OpKind::kGather, 3},     {OpKind::kReduce, 2, OpKind::kGather, 3},
      {OpKind::kScatter, 3, OpKind::kAllGather, 0}, {OpKind::kAllToAll, 0, OpKind::kBarrier, 0}};
  constexpr int kNumRanks = 4;
  for (const Calls& calls : all) {
    SCOPED_TRACE(format("{} and {}", calls.on_first_host, calls.on_second_host));
    const auto result = testing::run_job(
        {.world_size = kNumRanks}, [&](RankContext& context, const Membership& membership) {
          const bool is_first = context.rank < 2;
          testing::run_on_host(context, is_first ? 0 : 1, [&](RankContext& placed) {
            CommunicatorOptions options;
            options.timeout = kTimeout;
            options.listen_host = "127.0.0.1";
            const auto world = testing::connect(placed, membership, options);
            const testing::CollectiveCall call{
                .kind = is_first ? calls.on_first_host : calls.on_second_host,
                .dtype = DType::kFloat32,
                .count = 6,
                .root = is_first ? calls.root : calls.other_root,
                .reduction = ReduceOp::kSum,
                .world_size = kNumRanks};
            const std::vector<std::byte> in(call.num_input(placed.rank) * 4);
            std::vector<std::byte> out(call.num_output(placed.rank) * 4);
            world->barrier();
            const TimePoint begin = placed.system.now();
            placed.output = testing::failure_of([&] {
              world->run(call.collective(placed.rank, in, out));
              world->barrier();
              world->barrier();
            });
            testing::require(placed.system.now() - begin < kLimit,
                             "the errors come long before the deadline");
            world->close(placed.system.deadline_in(seconds(5)));
          });
        });
    EXPECT_TRUE(result.ok()) << result.failures();
    for (const auto& rank : result.ranks) {
      EXPECT_THAT(rank.output, ::testing::HasSubstr("the ranks disagree: rank "));
    }
  }
}

// Ranks of which one has another engine do not blame each other for calls that no rank has made.
TEST(HostsDisagreementTest, ADifferentTransportIsNamedLongBeforeTheDeadline) {
  const auto result =
      testing::run_job({.world_size = 4}, [](RankContext& context, const Membership& membership) {
        testing::run_on_host(context, context.rank / 2, [&](RankContext& placed) {
          CommunicatorOptions options;
          options.timeout = kTimeout;
          options.listen_host = "127.0.0.1";
          if (placed.rank == 3) options.transport = TransportChoice::kTcp;
          const TimePoint begin = placed.system.now();
          std::unique_ptr<Communicator> world;
          // Rank 2 may still connect: it expects memory of rank 3, which prepares none.
          placed.output = testing::failure_of([&] {
            world = testing::connect(placed, membership, options);
            std::vector<std::byte> data(4);
            world->all_reduce(data, data, DType::kFloat32, ReduceOp::kSum);
            world->barrier();
          });
          testing::require(placed.system.now() - begin < kLimit,
                           "the errors come long before the deadline");
          if (world != nullptr) world->close(placed.system.deadline_in(seconds(5)));
        });
      });
  EXPECT_TRUE(result.ok()) << result.failures();
  for (const auto& rank : result.ranks) {
    EXPECT_THAT(rank.output,
                ::testing::HasSubstr("use different engines (transports) for this group"));
    EXPECT_THAT(rank.output, ::testing::HasSubstr("pass the same transport"));
    EXPECT_THAT(rank.output, ::testing::Not(::testing::HasSubstr("#0")));
  }
}

}  // namespace
}  // namespace cadre
