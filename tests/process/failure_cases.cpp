#include "failure_cases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <span>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator_impl.h"
#include "cadre/core/comm/failure/diagnosis.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/on_host.h"
#include "cadre/testing/core/process_job.h"

namespace cadre::failures {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AnyOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::JobOptions;
using testing::mask;
using testing::nap;
using testing::RankContext;
using testing::require;
using ::testing::StartsWith;

constexpr int kWorldSize = 3;
// kStopTimeout is the time limit of the operation if the victim is stopped: before it ends, all
// ranks must have entered the operation. kLimit is the guaranteed time for the error. It is
// measured from the signal or, if the victim is only stopped, from the deadline of the operation.
#ifdef __SANITIZE_THREAD__  // ThreadSanitizer makes every rank several times slower
constexpr Duration kStopTimeout = seconds(5);
constexpr Duration kLimit = seconds(4);
#else
constexpr Duration kStopTimeout = seconds(2);
constexpr Duration kLimit = seconds(2);
#endif
// The number of elements. It is so large that with every engine the victim must move data in the
// operation, not only announce it.
constexpr size_t kCount = 1 << 20;

bool is_message(OpKind kind) {
  return kind == OpKind::kSend || kind == OpKind::kRecv;
}

// The roots are chosen so that the victim waits inside the operation for the rank that kills it. A
// broadcast, gather or scatter sends data in one direction only, so it must be large enough to fill
// the sockets' buffers within a few calls.
testing::CollectiveCall collective_call(OpKind kind) {
  const bool goes_one_way =
      kind == OpKind::kBroadcast || kind == OpKind::kGather || kind == OpKind::kScatter;
  const bool is_root_victim = kind == OpKind::kBroadcast || kind == OpKind::kGather;
  return {.kind = is_message(kind) ? OpKind::kBroadcast : kind,
          .dtype = DType::kFloat32,
          .count = goes_one_way ? kCount * kWorldSize : kCount,
          .root = is_root_victim ? kVictim : kKiller,
          .reduction = ReduceOp::kSum,
          .world_size = kWorldSize};
}

// A call of the operation under test.
class Call {
 public:
  Call(OpKind kind, Rank rank, conformance::RunCall run_call)
      : kind_(kind),
        run_call_(std::move(run_call)),
        call_(collective_call(kind)),
        in_(call_.num_input(rank), 1.0F),
        out_(call_.num_output(rank), 1.0F) {}

  void operator()(Communicator& group) {
    const Bytes out = std::as_writable_bytes(std::span(out_));
    if (is_message(kind_)) return exchange(group, out);
    run_call_(group, call_, std::as_bytes(std::span(in_)), out);
  }

 private:
  // Tests send and recv: survivors send to the victim or receive from it, while the victim waits
  // for a message that is never sent.
  void exchange(Communicator& group, Bytes data) {
    const bool is_victim = group.rank() == kVictim;
    if (is_victim) return group.recv(data.first(4), DType::kFloat32, kKiller, /*tag=*/99);
    if (kind_ == OpKind::kSend) return group.send(data, DType::kFloat32, kVictim, /*tag=*/1);
    group.recv(data, DType::kFloat32, kVictim, /*tag=*/2);
  }

  OpKind kind_;
  conformance::RunCall run_call_;
  // Describes a broadcast of as many elements, if a message is tested.
  testing::CollectiveCall call_;
  std::vector<float> in_;
  std::vector<float> out_;
};

// Returns what each rank does. Ranks on other hosts must be asked.
std::vector<std::string> states_of_peers(RankContext& context, const Communicator& group,
                                         Engine engine) {
  std::vector<std::string> states;
  if (engine == Engine::kTwoHosts) {
    Monitor& monitor = *CommunicatorParts::impl_of(group).monitor;
    for (const auto& view : monitor.ask_peers(context.system.deadline_in(milliseconds(500)))) {
      states.push_back(describe_peer(view));
    }
  } else {
    for (const PeerStatus& peer : group.peers()) states.push_back(peer.last_seen);
  }
  return states;
}

// Returns whether the rank has left the barrier before the operation under test. If a slow rank
// were still in the barrier, the barrier would fail instead of the operation.
bool is_past_barrier(const std::string& state) {
  return state.starts_with("last seen ") && state.find(" barrier #1,") == std::string::npos;
}

// Waits until the victim is inside the operation, then sends it the signal. Returns the time
// directly before that.
TimePoint disturb_when_inside(RankContext& context, Communicator& group, const Case& test) {
  // The operation under test has number 2, after the barrier; or 3, after the exchange that also
  // makes a second group.
  const int number = test.place == Place::kTwoGroups ? 3 : 2;
  const std::string inside = is_message(test.kind)
                                 ? "last seen in recv #1,"
                                 : format("last seen in {} #{},", test.kind, number);
  const Deadline patience = context.system.deadline_in(seconds(10));
  int pid = 0;
  while (pid == 0 && !patience.has_passed(context.system.now())) {
    const std::vector<std::string> states = states_of_peers(context, group, test.engine);
    if (states[kVictim].starts_with(inside) && is_past_barrier(states[kWitness])) {
      pid = group.peers()[kVictim].pid;
    }
    nap(context.system, milliseconds(2));
  }
  require(pid > 0,
          "the victim did not enter the operation within 10 s, or the third rank is still in the "
          "barrier");
  const TimePoint now = context.system.now();
  require(::kill(pid, test.signal) == 0, "the signal could not be sent");
  return now;
}

// Calls the operation until the group fails, and returns the failure. A rank that only sends may
// complete some more calls, until the sockets' buffers, whose size the kernel determines, are full.
Error failure_of(RankContext& context, Call& call, Communicator& group) {
  const Deadline patience = context.system.deadline_in(seconds(10));
  while (!patience.has_passed(context.system.now())) {
    try {
      call(group);
    } catch (const Error& error) {
      return error;
    }
  }
  throw Error(ErrorCode::kInternal, "no failure within 10 s");
}

// Rebuilds the group of the two survivors, and runs a sum in the same memory.
void rebuild(RankContext& context, const Membership& membership, const std::vector<Rank>& lost,
             const CommunicatorOptions& options, const Memory& memory) {
  const Membership next =
      rejoin(context.system, membership, lost, context.system.deadline_in(seconds(2)))
          .value_or_throw();
  require(next.world_size == kWorldSize - 1,
          format("{} ranks are left, expected two; {} were known to be gone", next.world_size,
                 lost.size()));
  const auto group = testing::connect(context, next, options);
  const std::vector<int32_t> values(1000, next.rank + 1);
  std::vector<int32_t> sums(values.size());
  memory.run_call(*group,
                  {.kind = OpKind::kAllReduce,
                   .dtype = DType::kInt32,
                   .count = values.size(),
                   .reduction = ReduceOp::kSum,
                   .world_size = next.world_size},
                  std::as_bytes(std::span(values)), std::as_writable_bytes(std::span(sums)));
  for (const int32_t sum : sums) require(sum == 3, "the sum of the rebuilt group must be 1 + 2");
  group->close(context.system.deadline_in(seconds(5)));
}

// An operation of another group that is in flight at the same time. The victim is not a member of
// that group.
class SecondGroup {
 public:
  SecondGroup(RankContext& context, Communicator& group) {
    group_ = split(group, {.color = 0, .name = "second"}, context.system.deadline_in(seconds(10)));
    const Bytes bytes = std::as_writable_bytes(std::span(values_));
    if (group.rank() != kVictim) {
      work_.emplace(group_->all_reduce_async(bytes, bytes, DType::kFloat32, ReduceOp::kSum));
    }
  }
  void expect_failure() {
    const std::string failure = testing::failed_fields_of([&] { work_->wait(); });
    require(failure.ends_with(" culprit=1 operation=all_reduce#1"), failure);
  }
  void close(RankContext& context) { group_->close(context.system.deadline_in(seconds(2))); }

 private:
  std::vector<float> values_ = std::vector<float>(kCount, 1.0F);
  std::unique_ptr<Communicator> group_;
  std::optional<Work> work_;
};

// Runs a rank that is in none of the groups under test. It must get only the failure of the world.
void stand_by(Communicator& world) {
  const std::string failure = testing::failed_fields_of([&] { world.barrier(); });
  require(failure.find(" culprit=") != std::string::npos, failure);
}

void live_through(RankContext& context, const Membership& membership, const Case& test,
                  const Memory& memory) {
  memory.prepare(context.rank);
  const testing::Resources before = testing::count_resources();
  CommunicatorOptions options = test.options();
  options.device_backend = memory.device_backend(context.rank);
  options.timeout = test.signal == SIGKILL ? Duration(seconds(30)) : kStopTimeout;
  {
    auto world = testing::connect(context, membership, options);
    std::unique_ptr<Communicator> subgroup;
    if (test.place != Place::kWorld) {
      SplitOptions choice{.name = "world"};
      if (context.rank >= test.num_outsiders()) choice.color = 1;
      subgroup = split(*world, choice, context.system.deadline_in(seconds(10)));
      if (subgroup == nullptr) return stand_by(*world);
    }
    Communicator& group = subgroup != nullptr ? *subgroup : *world;
    group.barrier();
    std::optional<SecondGroup> second;
    if (test.place == Place::kTwoGroups) second.emplace(context, group);
    Call call(test.kind, group.rank(), memory.run_call);
    const int victim_pid = group.peers()[kVictim].pid;
    testing::FailureReport report;
    if (group.rank() == kKiller) report.disturbed = disturb_when_inside(context, group, test);
    const Error error = failure_of(context, call, group);
    report.raised = context.system.now();
    // Every later call must throw this error again.
    try {
      group.barrier();
      require(false, "a failed group must throw for every operation");
    } catch (const Error& later) {
      require(later == error, "later calls must throw the first failure again");
    }
    report.message = format("{}: {}", to_string(error.code()), error.message());
    context.output = testing::to_text(report);
    const std::vector<Rank> lost = group.lost_ranks();
    const Membership failed = group.membership();
    const bool is_killer = group.rank() == kKiller;
    if (second) {
      second->expect_failure();
      second->close(context);
    }
    if (subgroup != nullptr) subgroup->close(context.system.deadline_in(seconds(2)));
    world->close(context.system.deadline_in(seconds(2)));
    subgroup.reset();
    world.reset();
    rebuild(context, failed, lost, options, memory);
    if (is_killer) ::kill(victim_pid, SIGKILL);
  }
  const std::string left = testing::leftovers_since(before);
  require(left.empty(), left);
}

// Returns the rank of the group whose operation timed out first: the other survivor's error quotes
// its text. The killer enters the operation last, so on a slow machine the witness is the first.
int first_to_time_out(const std::string& message) {
  static constexpr std::string_view kText = " timed out after N s on rank ";
  const size_t found = message.find(kText);
  require(found != std::string::npos && found + kText.size() < message.size(), message);
  return message[found + kText.size()] - '0';
}

void check_message(const Case& test, int rank, const std::string& message) {
  if (test.signal == SIGKILL) {
    // A rank that notices the failure between two operations throws a different text.
    EXPECT_THAT(message,
                AnyOf(StartsWith(format("kPeerLost: {} #N on group \"world\" failed after N s on "
                                        "rank {} (HOST, pid N)\n",
                                        test.kind, rank)),
                      StartsWith(format("kPeerLost: group \"world\" failed on rank {} (HOST, pid "
                                        "N) after ",
                                        rank))));
    EXPECT_THAT(message,
                HasSubstr(format("\n  rank 1 (HOST, pid N) is gone: its connection ended, {}",
                                 test.seen_from(rank))));
    EXPECT_THAT(message,
                EndsWith(format("{}. Remedy: restart the job or call rejoin().",
                                test.seen_from(rank).empty() ? "" : " #N, PHASE, N s ago")));
  } else {
    EXPECT_THAT(message, AnyOf(StartsWith("kTimeout: "), StartsWith("kAborted: ")));
    EXPECT_THAT(message, HasSubstr(" #N on group \"world\" timed out after N s on rank "));
    const std::string_view seen = test.seen_from(first_to_time_out(message));
    const std::string tag = test.kind == OpKind::kSend   ? "tag 1: "
                            : test.kind == OpKind::kRecv ? "tag 2: "
                                                         : "";
    EXPECT_THAT(message, HasSubstr(format("\n  {}waiting for rank 1 (HOST, pid N), which does not "
                                          "answer: {}",
                                          tag, seen)));
  }
}

}  // namespace

std::string name_of(const Case& test) {
  const Place place = test.place;
  return format("{}_{}_{}{}", test.kind, to_string(test.engine),
                test.signal == SIGKILL ? "kill" : "stop",
                place == Place::kWorld      ? ""
                : place == Place::kSubgroup ? "_subgroup"
                                            : "_two_groups");
}

std::vector<Case> cases_of(std::span<const OpKind> kinds, Place place) {
  std::vector<Case> cases;
  for (const Engine engine : {Engine::kHost, Engine::kTcp, Engine::kTwoHosts}) {
    for (const int signal : {SIGKILL, SIGSTOP}) {
      for (const OpKind kind : kinds) cases.push_back({kind, engine, signal, place});
    }
  }
  return cases;
}

void expect_named_failure(const Case& test, const Memory& memory) {
  const testing::Resources before = testing::count_resources();
  JobOptions options{.world_size = kWorldSize + test.num_outsiders()};
  options.processes.time_limit = seconds(40);
  const auto result =
      testing::run_job(options, [&](RankContext& context, const Membership& membership) {
        testing::run_on_host(context, test.host_of(context.rank), [&](RankContext& placed) {
          live_through(placed, membership, test, memory);
        });
      });
  const auto outcome_of = [&](int rank) {
    return result.ranks[static_cast<size_t>(rank + test.num_outsiders())];
  };
  EXPECT_EQ(outcome_of(kVictim).signal, SIGKILL);
  for (int outsider = 0; outsider < test.num_outsiders(); ++outsider) {
    EXPECT_EQ(result.ranks[static_cast<size_t>(outsider)].failure, "");
  }
  const Duration limit = test.signal == SIGKILL ? kLimit : kStopTimeout + kLimit;
  TimePoint disturbed;
  for (const int rank : {kKiller, kWitness}) {
    const auto outcome = outcome_of(rank);
    ASSERT_EQ(outcome.failure, "") << "rank " << rank;
    const testing::FailureReport report = testing::parse_report(outcome.output);
    if (rank == kKiller) disturbed = report.disturbed;
    const Duration waited = report.raised - disturbed;
    EXPECT_GE(waited.count(), 0) << "ns, rank " << rank;
    EXPECT_LT(waited.count(), limit.count()) << "ns, rank " << rank;
    const std::string message =
        testing::without_world_ranks(mask(report.message), test.num_outsiders());
    SCOPED_TRACE(outcome.output);
    check_message(test, rank, message);
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

}  // namespace cadre::failures
