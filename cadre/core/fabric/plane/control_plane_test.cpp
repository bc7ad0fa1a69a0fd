// Tests the control planes of ranks that are threads of one process, over loopback and unix
// sockets. The hosts of the ranks exist only in their addresses.
#include "cadre/core/fabric/plane/control_plane.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <numeric>

#include "cadre/testing/core/plane_job.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::require;

constexpr GroupKey kGroup = 77;
const std::vector<std::vector<int>> kShapes = {{3}, {2, 2}, {1, 1, 1}, {3, 1, 2, 1}};

struct Member {
  os::System& system;
  PlaneJob& job;
  int rank;
  ControlPlane& plane;
  std::shared_ptr<RecordedGroup> group;

  Deadline in(Duration time) const { return system.deadline_in(time); }
  void expect(const std::function<bool()>& is_met, std::string_view what) const {
    require(await(system, is_met, in(seconds(20))), format("rank {}: {}", rank, what));
  }
};

// Returns the ranks whose hosts the launcher of the rank has lost.
using LostRanksOf = std::function<std::vector<Rank>(int rank)>;

// Runs `body` on ranks that are all connected and attached to one group. At the end each rank
// closes its plane.
void run_members(const std::vector<int>& shape, const std::function<void(Member&)>& body,
                 const LostRanksOf& lost_ranks_of = nullptr) {
  PlaneJob job = PlaneJob::on_threads(shape);
  const auto result = testing::run_ranks_as_threads(job.num_ranks(), [&](testing::RankContext& at) {
    PlaneJob::Options options;
    if (lost_ranks_of) options.lost_ranks = [&] { return lost_ranks_of(at.rank); };
    auto plane = job.open(at.system, at.rank, std::move(options));
    job.await_connected(at.system, *plane, at.rank);
    Member member{at.system, job, at.rank, *plane, std::make_shared<RecordedGroup>(at.rank)};
    plane->attach(kGroup, member.group);
    job.meet(at.system, job.num_ranks(), "the start");
    body(member);
    plane->close(at.system.deadline_in(seconds(10)));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST(ControlPlane, ALeaveOfAGroupAndItsFailureReachAllOthersOnce) {
  for (const std::vector<int>& shape : kShapes) {
    run_members(shape, [](Member& member) {
      const int last = member.job.num_ranks() - 1;
      if (member.rank == 0) member.plane.tell_left(kGroup, 12, {});
      if (member.rank == last) {
        member.plane.tell_failure(
            {kGroup, last, {ErrorCode::kTimeout, 1, last, "cause", "message"}});
      }
      const size_t num_leavings = member.rank == 0 ? 0 : 1;
      const size_t num_failures = member.rank == last ? 0 : 1;
      member.expect(
          [&] {
            return member.group->leavings().size() >= num_leavings &&
                   member.group->failures().size() >= num_failures;
          },
          "both events arrive");
      member.job.meet(member.system, last + 1, "the end");
      require(member.group->leavings().size() == num_leavings, "one leave");
      require(member.group->failures().size() == num_failures, "one failure");
      if (num_leavings == 1) {
        require(member.group->leavings()[0] == std::pair<int, uint64_t>(0, 12),
                "rank 0 left after 12 collectives");
      }
      if (num_failures == 1) {
        const GroupFailure failure = member.group->failures()[0];
        require(failure.origin == last && failure.notice.cause == "cause",
                "the failure is that of the last rank");
      }
    });
  }
}

TEST(ControlPlane, AQuestionIsAnsweredByAllMembersThatAreAttached) {
  for (const std::vector<int>& shape : kShapes) {
    run_members(shape, [](Member& member) {
      const std::vector<int> all = all_ranks(member.job.num_ranks());
      const std::vector<StatusAnswer> answers =
          member.plane.ask(kGroup, all, member.in(seconds(20)));
      require(answers.size() == all.size(), format("{} answers", answers.size()));
      for (size_t i = 0; i < answers.size(); ++i) {
        require(answers[i].rank == static_cast<int>(i),
                "the answers are in the order of the ranks");
        require(answers[i].activity.number == 1000 + i, "the operation number of that rank");
      }
      member.job.meet(member.system, member.job.num_ranks(), "asked");
      // No rank is attached to this group.
      require(member.plane.ask(kGroup + 1, all, member.in(milliseconds(200))).empty(), "no answer");
      member.job.meet(member.system, member.job.num_ranks(), "asked again");
    });
  }
}

TEST(ControlPlane, WhatCameBeforeIsToldWhenAGroupIsAttached) {
  run_members({2, 2}, [](Member& member) {
    if (member.rank == 3) {
      member.plane.tell_left(kGroup + 5, 9, {});
      member.plane.tell_failure({kGroup + 5, 3, {ErrorCode::kAborted, 3, 3, "early", ""}});
    } else {
      const auto late = std::make_shared<RecordedGroup>(member.rank);
      member.expect(
          [&] {
            member.plane.attach(kGroup + 5, std::make_shared<RecordedGroup>(member.rank));
            member.plane.attach(kGroup + 5, late);
            return !late->failures().empty();
          },
          "the failure is delivered by attach()");
      require(!late->leavings().empty(), "attach() also delivers the leave that came before");
      require(member.group->failures().empty(), "this group gets no failure of another group");
      member.plane.detach(kGroup + 5);
    }
    member.job.meet(member.system, 4, "the end");
  });
}

TEST(ControlPlane, ARankThatLeavesInGoodOrderIsNotLost) {
  for (const std::vector<int>& shape : kShapes) {
    run_members(shape, [](Member& member) {
      if (member.rank == 0) return;
      member.expect([&] { return member.plane.has_left(0); }, "rank 0 has left");
      // This rank sees the connections of rank 0 end during this pause.
      member.system.make_waiter()->park(member.in(milliseconds(300)));
      require(member.group->losses().empty(), "nobody is lost");
      member.job.meet(member.system, member.job.num_ranks() - 1, "the end");
    });
  }
}

// The launcher of the first rank names the ranks of the last host, whose connections stay open, and
// ranks that nobody can lose: itself, and some that do not exist.
TEST(ControlPlane, RanksThatTheLauncherNamesAreLostForAll) {
  for (const std::vector<int>& shape : {std::vector{2, 2}, {1, 1, 1}, {3, 1, 2, 1}}) {
    const int num_ranks = std::accumulate(shape.begin(), shape.end(), 0);
    std::vector<int> lost;
    for (int rank = num_ranks - shape.back(); rank < num_ranks; ++rank) lost.push_back(rank);
    std::atomic<bool> has_met = false;
    const auto lost_ranks_of = [&](int rank) {
      std::vector<Rank> named;
      if (rank != 0 || !has_met) return named;
      named.assign(lost.begin(), lost.end());
      for (const int nobody : {-1, 0, num_ranks}) named.emplace_back(nobody);
      return named;
    };
    const auto body = [&](Member& member) {
      has_met = true;
      member.expect([&] { return member.group->lost().size() >= lost.size(); }, "they are lost");
      member.job.meet(member.system, num_ranks, "told");
      require(member.group->lost() == lost, "each is lost once, and no other rank");
      for (const LossReport& loss : member.group->losses()) {
        require(loss.sign == SignOfLoss::kNamedByLauncher && loss.reporter == 0, "the reason");
      }
      member.job.meet(member.system, num_ranks, "the end");
    };
    run_members(shape, body, lost_ranks_of);
  }
}

TEST(ControlPlane, AnOpenDataConnectionIsHandedOver) {
  PlaneJob job = PlaneJob::on_threads({1, 1});
  const auto result = testing::run_ranks_as_threads(2, [&](testing::RankContext& at) {
    std::mutex mutex;
    std::vector<std::pair<int, std::unique_ptr<os::Socket>>> taken;
    PlaneJob::Options options;
    options.on_data_connection = [&](int peer, std::unique_ptr<os::Socket> socket) {
      std::lock_guard lock(mutex);
      taken.emplace_back(peer, std::move(socket));
    };
    auto plane = job.open(at.system, at.rank, std::move(options));
    std::unique_ptr<os::Socket> socket;
    if (at.rank == 0) {
      socket = plane->dial_data(1, at.system.deadline_in(seconds(20))).value_or_throw();
      const std::byte byte{42};
      require(socket->try_send(ConstBytes(&byte, 1)).value_or_throw() == 1, "a byte is sent");
    } else {
      const auto has_byte = [&] {
        std::lock_guard lock(mutex);
        std::byte byte{};
        return !taken.empty() && taken[0].first == 0 &&
               taken[0].second->try_recv(Bytes(&byte, 1)).value_or_throw() == 1 &&
               byte == std::byte{42};
      };
      require(await(at.system, has_byte, at.system.deadline_in(seconds(20))), "the byte arrives");
    }
    job.meet(at.system, 2, "the end");
    plane->close(at.system.deadline_in(seconds(10)));
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

// The plane of a world of one rank has no thread, and no call may wait for a peer.
TEST(ControlPlane, OfOneRank) {
  run_members({1}, [](Member& member) {
    member.plane.tell_left(kGroup, 1, {});
    const std::vector<int> self = {0};
    require(member.plane.ask(kGroup, self, member.in(seconds(10))).size() == 1, "its own answer");
    require(member.plane.lost_ranks().empty(), "nobody is lost");
  });
}

}  // namespace
}  // namespace cadre
