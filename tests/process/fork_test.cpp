// Tests ranks that fork without exec. In the child, every call on the parent's group must throw;
// the child may destroy its copies of the objects and connect groups of its own. The parent's job
// continues. If a rank is killed while such a child is alive, the others must still detect the
// loss.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <functional>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/comm/groups/split.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::JobOptions;
using testing::mask;
using testing::RankContext;
using testing::require;

// The child sets alarm(), which ends it if it hangs. Unlike glibc's allocator, the allocators of
// the sanitizers do not handle their locks in fork(): a lock that another thread holds stays locked
// in the child. So with a sanitizer the test gives up a child that hangs, and forks another one.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr unsigned kChildSeconds = 6;
constexpr int kNumTries = 4;
#else
constexpr unsigned kChildSeconds = 20;
constexpr int kNumTries = 1;
#endif

struct ChildOutcome {
  int signal = 0;       // the signal that has ended the child; 0 if none has
  std::string failure;  // empty if `body` returned without an exception
};

ChildOutcome run_in_child(const std::function<void()>& body) {
  std::array<int, 2> ends{};
  require(::pipe(ends.data()) == 0, "pipe() failed");
  const pid_t pid = ::fork();
  require(pid >= 0, "fork() failed");
  if (pid == 0) {
    ::alarm(kChildSeconds);
    const std::string failure = testing::failure_of(body);
    const ssize_t written = ::write(ends[1], failure.data(), failure.size());
    ::_exit(written == static_cast<ssize_t>(failure.size()) ? 0 : 1);
  }
  ::close(ends[1]);
  std::string failure;
  std::array<char, 4096> buffer{};
  while (true) {
    const ssize_t got = ::read(ends[0], buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    failure.append(buffer.data(), static_cast<size_t>(got));
  }
  ::close(ends[0]);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return {WIFSIGNALED(status) ? WTERMSIG(status) : 0, failure};
}

// Runs `body` in a forked child and returns its failure; an empty text if it returned without one.
std::string failure_in_child(const std::function<void()>& body) {
  ChildOutcome outcome = run_in_child(body);
  for (int i = 1; i < kNumTries && outcome.signal == SIGALRM; ++i) outcome = run_in_child(body);
  if (outcome.signal != 0) return format("the child was ended by signal {}", outcome.signal);
  return outcome.failure;
}

std::vector<int32_t> sum(Communicator& group, int32_t own) {
  std::vector<int32_t> values(5000, own);
  const Bytes bytes = std::as_writable_bytes(std::span(values));
  group.all_reduce(bytes, bytes, DType::kInt32, ReduceOp::kSum);
  return values;
}

// Returns every call that a rank can make on a group of three ranks.
std::vector<std::pair<std::string, std::function<void()>>> calls_of(Communicator& group,
                                                                    const Work& pending) {
  static std::array<std::byte, 12> small{};
  static std::array<std::byte, 36> large{};
  static std::array<std::byte, 36> other{};
  const SplitCounts parts{.input = {3, 3, 3}, .output = {3, 3, 3}};
  constexpr DType kType = DType::kInt32;
  constexpr ReduceOp kSum = ReduceOp::kSum;
  const Deadline soon = group.system().deadline_in(seconds(5));
  return {
      {"broadcast", [&] { group.broadcast(small, kType, 0); }},
      {"all_reduce", [&] { group.all_reduce(small, small, kType, kSum); }},
      {"reduce", [&] { group.reduce(small, small, kType, kSum, 0); }},
      {"all_gather", [&] { group.all_gather(small, large, kType); }},
      {"reduce_scatter", [&] { group.reduce_scatter(large, small, kType, kSum); }},
      {"gather", [&] { group.gather(small, large, kType, 0); }},
      {"scatter", [&] { group.scatter(large, small, kType, 0); }},
      {"all_to_all", [&] { group.all_to_all(large, other, kType); }},
      {"all_to_all_v", [&, parts] { group.all_to_all_v(large, other, kType, parts); }},
      {"barrier", [&] { group.barrier(); }},
      {"send", [&] { group.send(small, kType, 1, 0); }},
      {"recv", [&] { group.recv(small, kType, 1, 0); }},
      {"all_reduce_async", [&] { group.all_reduce_async(small, small, kType, kSum).wait(); }},
      {"send_async", [&] { group.send_async(small, kType, 1, 0).wait(); }},
      {"wait", [&] { pending.wait(); }},
      {"wait with a deadline", [&, soon] { pending.wait(soon); }},
      {"allocate_symmetric", [&] { group.allocate_symmetric(64); }},
      {"split", [&, soon] { split(group, {.color = 0}, soon); }},
      {"peers", [&] { group.peers(); }},
      {"abort", [&] { group.abort("from the child"); }},
      {"close", [&, soon] { group.close(soon); }},
  };
}

// Runs in the child: checks the error of every call, and destroys all copies of the parent's
// objects.
void try_everything(std::unique_ptr<Communicator>& group, std::shared_ptr<SymmetricBuffer>& buffer,
                    std::unique_ptr<Work>& pending, const std::string& expected) {
  require(group->rank() == 0 && group->world_size() == 3,
          "rank and size must be readable in the child");
  for (const auto& [name, call] : calls_of(*group, *pending)) {
    const std::string failure = testing::failure_of(call);
    require(failure == expected, format("{} in the child: {}", name, failure));
  }
  group.reset();
  buffer.reset();
  pending.reset();
  // A group that the child itself connects must work.
  const auto system = os::make_native_system();
  const auto own = Communicator::connect(*system, {}, {}, system->deadline_in(seconds(5)));
  require(sum(*own, 5).front() == 5, "wrong sum of the group that the child has connected");
  own->close(system->deadline_in(seconds(5)));
}

void fork_in_a_job(RankContext& context, const Membership& membership, TransportChoice transport) {
  const testing::Resources before = testing::count_resources();
  {
    std::unique_ptr<Communicator> group =
        testing::connect(context, membership, {.timeout = seconds(30), .transport = transport});
    std::shared_ptr<SymmetricBuffer> buffer = group->allocate_symmetric(4096);
    const int own = group->rank().value + 1;
    require(sum(*group, own).front() == 6, "the sum of the three ranks must be 1 + 2 + 3");
    group->barrier_async().wait();  // afterwards the group has started all its threads
    std::array<std::byte, 4> message{};
    const Bytes bytes = message;
    if (context.rank == 0) {
      auto pending = std::make_unique<Work>(group->recv_async(bytes, DType::kInt32, 1, 3));
      const std::string expected = format(
          "kInvalidArgument: group \"world\" belongs to rank 0, pid {}, from which this process "
          "was "
          "forked: it has none of the group's threads and shares its connections. Remedy: connect "
          "a new group in the child, or use this one in its parent only",
          ::getpid());
      const std::string failure =
          failure_in_child([&] { try_everything(group, buffer, pending, expected); });
      require(failure.empty(), failure);
      group->barrier();
      pending->wait();
      require(message[0] == std::byte{7}, "the message of the parent has wrong content");
    } else {
      group->barrier();  // the other ranks enter it after the child has ended
      message[0] = std::byte{7};
      if (context.rank == 1) group->send(bytes, DType::kInt32, 0, 3);
    }
    for (int i = 0; i < 20; ++i)
      require(sum(*group, own).back() == 6,
              "the parent's group computes a wrong sum after the fork");
    const auto more = group->allocate_symmetric(4096);
    group->close(context.system.deadline_in(seconds(5)));
  }
  const std::string left = testing::leftovers_since(before);
  require(left.empty(), left);
}

class ForkTest : public ::testing::TestWithParam<TransportChoice> {};

TEST_P(ForkTest, AChildIsRefusedAndItsParentsJobGoesOn) {
  const testing::Resources before = testing::count_resources();
  JobOptions options{.world_size = 3};
  options.processes.time_limit = seconds(60);
  const auto result =
      testing::run_job(options, [&](RankContext& context, const Membership& membership) {
        fork_in_a_job(context, membership, GetParam());
      });
  EXPECT_TRUE(result.ok()) << result.failures();
  EXPECT_EQ(testing::leftovers_since(before), "");
}

// A child that only exits, or destroys its copies of the objects, must not send anything to other
// ranks.
TEST_P(ForkTest, AChildThatOnlyEndsIsNotNoticed) {
  JobOptions options{.world_size = 2};
  const auto result =
      testing::run_job(options, [&](RankContext& context, const Membership& membership) {
        auto group = testing::connect(context, membership, {.transport = GetParam()});
        group->barrier();
        for (int i = 0; i < 5; ++i) {
          const std::string failure = failure_in_child([&] { group.reset(); });
          require(failure.empty(), failure);
        }
        require(sum(*group, 1).front() == 2, "the parents' group computes a wrong sum");
        group->close(context.system.deadline_in(seconds(5)));
      });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The victim forks a child, which inherits all its connections and stays alive after the victim is
// killed.
void outlive_a_parent(RankContext& context, const Membership& membership,
                      TransportChoice transport) {
  constexpr int kVictim = 1;
  const Deadline patience = context.system.deadline_in(seconds(20));
  auto group =
      testing::connect(context, membership, {.timeout = seconds(30), .transport = transport});
  group->barrier();
  if (context.rank == kVictim) {
    const pid_t child = ::fork();
    require(child >= 0, "fork() failed");
    if (child == 0) {
      ::alarm(kChildSeconds);
      while (true) ::pause();
    }
    membership.store->set("child", std::to_string(child), patience).value_or_throw();
    group->recv_async({}, DType::kInt32, 0, 9).wait();  // rank 0 never sends this message
  }
  const int child = std::stoi(membership.store->get("child", patience).value_or_throw());
  testing::FailureReport report;
  if (context.rank == 0) {
    report.disturbed = context.system.now();
    require(::kill(group->peers()[kVictim].pid, SIGKILL) == 0, "the signal could not be sent");
  }
  report.message = testing::failure_of([&] { group->barrier(); });
  report.raised = context.system.now();
  context.output = testing::to_text(report);
  const std::vector<Rank> lost = group->lost_ranks();
  group->close(context.system.deadline_in(seconds(2)));
  const Membership next =
      rejoin(context.system, membership, lost, context.system.deadline_in(seconds(2)))
          .value_or_throw();
  require(next.world_size == 2, format("{} are left", next.world_size));
  group = testing::connect(context, next, {.transport = transport});
  require(sum(*group, next.rank.value + 1).front() == 3,
          "the sum of the rebuilt group must be 1 + 2");
  group->close(context.system.deadline_in(seconds(5)));
  if (context.rank == 0) require(::kill(child, SIGKILL) == 0, "the child has ended too early");
}

TEST_P(ForkTest, AKilledParentIsMissedThoughItsChildHoldsItsConnections) {
  constexpr Duration kLimit = seconds(2);
  JobOptions options{.world_size = 3};
  options.processes.time_limit = seconds(60);
  const auto result =
      testing::run_job(options, [&](RankContext& context, const Membership& membership) {
        outlive_a_parent(context, membership, GetParam());
      });
  TimePoint disturbed;
  for (const int rank : {0, 2}) {
    const auto& outcome = result.ranks[static_cast<size_t>(rank)];
    ASSERT_EQ(outcome.failure, "") << "rank " << rank;
    const testing::FailureReport report = testing::parse_report(outcome.output);
    if (rank == 0) disturbed = report.disturbed;
    EXPECT_LT((report.raised - disturbed).count(), kLimit.count()) << "ns, rank " << rank;
    const std::string message = mask(report.message);
    EXPECT_THAT(message, ::testing::StartsWith("kPeerLost: "));
    EXPECT_THAT(message, HasSubstr("\n  rank 1 (HOST, pid N) is gone: its process ended, last "
                                   "seen "));
    EXPECT_THAT(message, EndsWith(" N s ago. Remedy: restart the job or call rejoin()."));
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, ForkTest,
                         ::testing::Values(TransportChoice::kAuto, TransportChoice::kTcp),
                         [](const auto& test) {
                           return test.param == TransportChoice::kTcp ? "tcp" : "host";
                         });

}  // namespace
}  // namespace cadre
