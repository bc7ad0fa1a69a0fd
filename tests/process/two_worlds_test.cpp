// Tests processes that are members of two jobs at once, with a different rank in each. Operations
// of the two jobs interleave, and one job ends or fails while the other goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/store/file/file_store.h"
#include "cadre/testing/core/leftovers.h"
#include "cadre/testing/core/process_job.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::RankContext;
using testing::require;
using ::testing::StartsWith;

constexpr Duration kTimeout = seconds(20);
// All errors must be thrown within this time. It is far less than the timeout of the operations,
// and far more than the guaranteed time for an error.
constexpr Duration kLimit = seconds(5);
// Three processes are in the large job. The last two are also in the small job, in reverse order.
constexpr int kLargeSize = 3;
constexpr int kSmallSize = 2;
constexpr int kOnlyInLarge = 0;
constexpr int kNumSteps = 40;
constexpr int kTag = 1;

enum class End { kClose, kAbort, kKill };

struct Case {
  TransportChoice transport;
  End end;  // how the large job ends: close, abort or kill
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  constexpr std::array<const char*, 3> kEnds = {"close", "abort", "kill"};
  return format("{}_{}", info.param.transport == TransportChoice::kTcp ? "tcp" : "host",
                kEnds[static_cast<size_t>(info.param.end)]);
}

// An asynchronous sum of rank + 1 over the ranks of a group.
class Sum {
 public:
  explicit Sum(Communicator& group)
      : data_(std::make_shared<std::vector<int64_t>>(1000, group.rank() + 1)),
        expected_(group.world_size() * (group.world_size() + 1) / 2),
        work_(group.all_reduce_async(bytes(), bytes(), DType::kInt64, ReduceOp::kSum,
                                     {.keep_alive = data_})) {}

  void finish() {
    work_.wait();
    for (const int64_t value : *data_) require(value == expected_, "wrong sum of the group");
  }

 private:
  Bytes bytes() { return std::as_writable_bytes(std::span(*data_)); }

  std::shared_ptr<std::vector<int64_t>> data_;
  int64_t expected_;
  Work work_;
};

// Runs one operation in each job, in every order in which the two can begin and end.
void interleave(Communicator& large, Communicator& small) {
  for (int step = 0; step < kNumSteps; ++step) {
    Communicator& first = step % 2 == 0 ? large : small;
    Communicator& second = step % 2 == 0 ? small : large;
    Sum one(first);
    Sum other(second);
    if (step % 4 < 2) one.finish();
    other.finish();
    if (step % 4 >= 2) one.finish();
  }
}

void work(Communicator& group) {
  for (int step = 0; step < 100; ++step) Sum(group).finish();
}

std::unique_ptr<Communicator> join_small(RankContext& context, TransportChoice transport,
                                         const std::string& store_file) {
  const std::shared_ptr<Store> store =
      FileStore::open(context.system, {.path = store_file}, context.system.deadline_in(kTimeout))
          .value_or_throw();
  const Membership membership{.rank = kLargeSize - 1 - context.rank,
                              .world_size = kSmallSize,
                              .round = 1,
                              .store = store,
                              .job_token = "token of the small job"};
  return testing::connect(context, membership, {.timeout = kTimeout, .transport = transport});
}

// Runs in the process that is only in the large job, when the others have signalled that they have
// finished the sums.
void end_large(Communicator& large, Deadline deadline, End end) {
  if (end == End::kClose) return large.close(deadline);
  std::byte ready{};
  for (const Rank other : {1, 2}) large.recv(Bytes(&ready, 1), DType::kUint8, other, kTag);
  if (end == End::kKill) ::raise(SIGKILL);
  large.abort("the large job has enough");
  large.close(deadline);
}

// Ends the large job in the given way and returns its error. An operation of the small job is in
// flight at that time and must succeed.
std::string failure_of_large(Communicator& large, Communicator& small) {
  Sum across(small);
  const std::string failure = testing::failure_of([&] {
    const std::byte ready{};
    large.send(ConstBytes(&ready, 1), DType::kUint8, kOnlyInLarge, kTag);
    Sum(large).finish();
  });
  across.finish();
  return failure;
}

// Returns the errors of the large job on the processes that are in both jobs.
void live_through(RankContext& context, const Membership& membership, const Case& test,
                  const std::string& store_file) {
  const testing::Resources before = testing::count_resources();
  const Deadline close_by = context.system.deadline_in(kTimeout);
  {
    const auto large =
        testing::connect(context, membership, {.timeout = kTimeout, .transport = test.transport});
    if (context.rank == kOnlyInLarge) {
      for (int step = 0; step < kNumSteps; ++step) Sum(*large).finish();
      return end_large(*large, close_by, test.end);
    }
    const auto small = join_small(context, test.transport, store_file);
    interleave(*large, *small);
    const TimePoint begin = context.system.now();
    if (test.end == End::kClose) {
      large->close(close_by);
    } else {
      context.output = failure_of_large(*large, *small);
    }
    require(context.system.now() - begin < kLimit, "the error came too late");
    work(*small);
    large->close(close_by);
    work(*small);
    small->close(close_by);
  }
  const std::string left = testing::leftovers_since(before);
  require(left.empty(), left);
}

class TwoWorlds : public ::testing::TestWithParam<Case> {};

TEST_P(TwoWorlds, OneGoesOnWhenTheOtherEnds) {
  const testing::TemporaryFolder folder;
  const testing::Resources before = testing::count_resources();
  const auto result = testing::run_job(
      {.world_size = kLargeSize}, [&](RankContext& context, const Membership& membership) {
        live_through(context, membership, GetParam(), folder.file("store"));
      });
  const End end = GetParam().end;
  EXPECT_EQ(result.ranks[kOnlyInLarge].signal, end == End::kKill ? SIGKILL : 0);
  for (const size_t rank : {size_t{1}, size_t{2}}) {
    const auto& outcome = result.ranks[rank];
    ASSERT_EQ(outcome.failure, "") << "rank " << rank;
    if (end == End::kClose) {
      EXPECT_EQ(outcome.output, "");
    }
    if (end == End::kAbort) {
      EXPECT_THAT(outcome.output, StartsWith("kAborted: "));
      EXPECT_THAT(outcome.output, HasSubstr("the large job has enough"));
    }
    if (end == End::kKill) {
      EXPECT_THAT(outcome.output, StartsWith("kPeerLost: "));
      EXPECT_THAT(testing::mask(outcome.output), HasSubstr("\n  rank 0 (HOST, pid N) is gone: "));
    }
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto transport : {TransportChoice::kAuto, TransportChoice::kTcp}) {
    for (const End end : {End::kClose, End::kAbort, End::kKill}) cases.push_back({transport, end});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, TwoWorlds, ::testing::ValuesIn(all_cases()), name_of);

}  // namespace
}  // namespace cadre
