#include "cadre/core/comm/trace/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cadre/core/base/format.h"
#include "cadre/core/collective/op.h"

namespace cadre {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using wire::ActivityState;
using Kind = RankStanding::Kind;

constexpr int64_t kSecond = 1'000'000'000;

Fingerprint call(OpKind kind, uint64_t count = 8) {
  return OpDescriptor{kind, DType::kFloat32, ReduceOp::kSum, 0, count}.fingerprint();
}

// Builds the flight record of a rank.
class Story {
 public:
  explicit Story(int rank, int world_size = 3) {
    record_.identity = {"world", "node0", rank, world_size, 4000 + rank, 1};
  }
  Story& done(uint64_t number, const Fingerprint& fingerprint, int64_t begin, int64_t end) {
    return add({0, number, fingerprint, begin, end, ActivityState::kDone, -1, ""});
  }
  Story& running(uint64_t number, const Fingerprint& fingerprint, int64_t begin, int peer = -1) {
    return add({0, number, fingerprint, begin, 0, ActivityState::kRunning, peer, ""});
  }
  Story& failed(uint64_t number, const Fingerprint& fingerprint, int64_t begin, int64_t end,
                int peer) {
    return add({0, number, fingerprint, begin, end, ActivityState::kFailed, peer, "reduce"});
  }
  Story& alive_at(int64_t now) {
    record_.alive_at = TimePoint{now};
    return *this;
  }
  Story& of_group(const std::string& name, const std::string& id) {
    record_.identity.group = name;
    record_.identity.id = id;
    return *this;
  }
  FlightRecord record() const { return record_; }

 private:
  Story& add(FlightEntry entry) {
    entry.index = record_.entries.size();
    record_.entries.push_back(std::move(entry));
    return *this;
  }
  FlightRecord record_;
};

GroupTrace trace_of(std::vector<FlightRecord> records) {
  auto traces = trace_groups(std::move(records));
  EXPECT_EQ(traces.size(), 1U);
  return traces.front();
}

std::vector<Kind> kinds(const GroupTrace& trace) {
  std::vector<Kind> kinds;
  for (const RankStanding& standing : trace.standings) kinds.push_back(standing.kind);
  return kinds;
}

const Fingerprint kReduce = call(OpKind::kAllReduce);
const Fingerprint kGather = call(OpKind::kAllGather);

TEST(Trace, NamesTheRankThatDidNotCall) {
  const GroupTrace trace = trace_of({
      Story(0).done(1, kGather, 0, 10).failed(2, kReduce, 20, 20 + 60 * kSecond, 2).record(),
      Story(1).done(1, kGather, 0, 10).failed(2, kReduce, 30, 20 + 60 * kSecond, 2).record(),
      Story(2).done(1, kGather, 0, 12).record(),
  });
  EXPECT_EQ(trace.stopped_at, 2U);
  EXPECT_EQ(trace.call, "all_reduce(sum, float32 x 8)");
  EXPECT_THAT(kinds(trace), ElementsAre(Kind::kWaiting, Kind::kWaiting, Kind::kOwing));
  EXPECT_EQ(trace.standings[0].text,
            "was in it for 60 s, then failed in \"reduce\", waiting for rank 2");
  EXPECT_EQ(trace.standings[2].text,
            "did not call it: last seen after all_gather #1, 60 s before the records end");
  EXPECT_EQ(to_text(trace, 0),
            "group \"world\", round 1: 3 ranks; records of ranks 0-2 on 1 host\n"
            "  stopped at #2 all_reduce(sum, float32 x 8)\n"
            "    waited     rank 0 (node0, pid 4000): was in it for 60 s, then failed in "
            "\"reduce\", waiting for rank 2\n"
            "    waited     rank 1 (node0, pid 4001): was in it for 60 s, then failed in "
            "\"reduce\", waiting for rank 2\n"
            "    owes       rank 2 (node0, pid 4002): did not call it: last seen after all_gather "
            "#1, 60 s before the records end\n");
}

TEST(Trace, NamesTheRankThatWasKilledInside) {
  const GroupTrace trace = trace_of({
      Story(0).failed(1, kReduce, 0, kSecond, 1).record(),
      Story(1).running(1, kReduce, 0).record(),
      Story(2).failed(1, kReduce, 0, kSecond, 1).record(),
  });
  EXPECT_EQ(trace.stopped_at, 1U);
  EXPECT_THAT(kinds(trace), ElementsAre(Kind::kWaiting, Kind::kOwing, Kind::kWaiting));
  EXPECT_THAT(trace.standings[1].text, HasSubstr("did not end it"));
}

// Ranks that are alive are still in the collective, so the time that they have spent in it must be
// counted until now, not until the newest event.
TEST(Trace, TimeGoesOnWhileRanksLive) {
  const GroupTrace trace = trace_of({
      Story(0).done(1, kGather, 0, 10).running(2, kReduce, 20).alive_at(12 * kSecond).record(),
      Story(1).done(1, kGather, 0, 10).running(2, kReduce, 30).record(),
      Story(2).done(1, kGather, 0, 12).alive_at(12 * kSecond).record(),
  });
  EXPECT_THAT(kinds(trace), ElementsAre(Kind::kWaiting, Kind::kWaiting, Kind::kOwing));
  EXPECT_EQ(trace.standings[0].text, "was still in it after 12 s");
  EXPECT_EQ(trace.standings[1].text, "was in it when its record ends");
  EXPECT_EQ(trace.standings[2].text, "did not call it: last seen after all_gather #1, 12 s ago");
}

TEST(Trace, NamesTheRankWithoutARecord) {
  const GroupTrace trace = trace_of({
      Story(0).running(1, kReduce, 0).record(),
      Story(2).running(1, kReduce, 0).record(),
  });
  EXPECT_THAT(kinds(trace), ElementsAre(Kind::kWaiting, Kind::kNoRecord, Kind::kWaiting));
  EXPECT_THAT(to_text(trace, 3), HasSubstr("records of ranks 0, 2 on 1 host"));
}

TEST(Trace, ReportsNothingWhenAllFinished) {
  const GroupTrace trace = trace_of({
      Story(0, 2).done(1, kReduce, 0, 10).done(2, kGather, 20, 30).record(),
      Story(1, 2).done(1, kReduce, 5, 10).done(2, kGather, 21, 30).record(),
  });
  EXPECT_EQ(trace.stopped_at, std::nullopt);
  EXPECT_THAT(trace.standings, IsEmpty());
  const std::string text = to_text(trace, 1);
  EXPECT_THAT(text, HasSubstr("every rank with a record finished"));
  EXPECT_THAT(text, HasSubstr("#2"));
  EXPECT_THAT(text, Not(HasSubstr("#1 ")));
}

// A rank that is far ahead has finished the collectives that its record, a ring buffer, no longer
// contains.
TEST(Trace, WhatTheRingForgotCountsAsFinished) {
  const GroupTrace trace = trace_of({
      Story(0, 2).done(5000, kReduce, 0, 10).running(5001, kReduce, 20).record(),
      Story(1, 2).done(5000, kReduce, 0, 10).record(),
  });
  EXPECT_EQ(trace.stopped_at, 5001U);
  EXPECT_THAT(kinds(trace), ElementsAre(Kind::kWaiting, Kind::kOwing));
}

TEST(Trace, ShowsBothSidesOfADisagreement) {
  const GroupTrace trace = trace_of({
      Story(0, 2).failed(1, kReduce, 0, 10, 1).record(),
      Story(1, 2).failed(1, kGather, 0, 10, 0).record(),
  });
  EXPECT_THAT(trace.disagreements,
              ElementsAre("#1: rank 0 (node0, pid 4000) called all_reduce(sum, float32 x 8), rank "
                          "1 (node0, pid 4001) called all_gather(float32 x 8)"));
}

TEST(Trace, SaysWhatBecameOfMessages) {
  const Fingerprint recv = call(OpKind::kRecv);
  const Fingerprint send = call(OpKind::kSend, 4);
  const GroupTrace trace = trace_of({
      Story(0).running(1, recv, 0, 1).record(),
      Story(1).running(1, send, 0, 0).record(),
      Story(2).running(1, recv, 0, 0).record(),
  });
  ASSERT_EQ(trace.open_messages.size(), 3U);
  EXPECT_THAT(trace.open_messages[0], HasSubstr("rank 1 had send"));
  EXPECT_THAT(trace.open_messages[0], HasSubstr("another tag, type or size?"));
  EXPECT_THAT(trace.open_messages[2], HasSubstr("rank 0 owes the send"));
}

TEST(Trace, KeepsGroupsAndRoundsApartAndTheLaterRecordOfARank) {
  FlightRecord later = Story(0, 1).done(1, kReduce, 100, 110).record();
  FlightRecord second_round = Story(0, 1).done(7, kReduce, 0, 10).record();
  second_round.identity.round = 2;
  const auto traces =
      trace_groups({Story(0, 1).running(1, kReduce, 0).record(), later, std::move(second_round)});
  ASSERT_EQ(traces.size(), 2U);
  EXPECT_EQ(traces[0].round, 1U);
  EXPECT_EQ(traces[0].stopped_at, std::nullopt);
  EXPECT_EQ(traces[1].round, 2U);
}

TEST(Trace, KeepsGroupsOfOneNameApart) {
  const auto traces = trace_groups({
      Story(0, 1).of_group("row", "world/1.1").running(1, kReduce, 0).record(),
      Story(0, 1).of_group("row", "world/1.0").done(1, kReduce, 0, 10).record(),
  });
  ASSERT_EQ(traces.size(), 2U);
  EXPECT_THAT(to_text(traces[0], 0), HasSubstr("group \"row\" (world/1.0), round 1"));
  EXPECT_EQ(traces[0].stopped_at, std::nullopt);
  EXPECT_EQ(traces[1].stopped_at, 1U);
}

// A folder contains the records of a job of three ranks and of a later job of two ranks, whose
// groups have the same names.
TEST(Trace, KeepsJobsApart) {
  const auto record_of = [](int rank, int pid, uint64_t connection, int64_t made_at_s) {
    FlightRecord record = Story(rank).done(1, kReduce, 0, 10).record();
    record.identity.pid = pid;
    record.identity.connection = connection;
    record.identity.made_at_s = made_at_s;
    return record;
  };
  FlightRecord subgroup = Story(0, 1).of_group("row", "world/1.0").done(1, kReduce, 0, 10).record();
  subgroup.identity.pid = 11;  // belongs to rank 1 of the second job
  subgroup.identity.connection = 8;
  subgroup.identity.made_at_s = 201;
  const auto jobs = split_jobs({record_of(0, 10, 7, 200), record_of(2, 3, 5, 100),
                                std::move(subgroup), record_of(1, 11, 7, 200)});
  ASSERT_EQ(jobs.size(), 2U);
  ASSERT_EQ(jobs[0].size(), 1U);
  EXPECT_EQ(jobs[0][0].identity.pid, 3);
  EXPECT_EQ(jobs[1].size(), 3U);
  EXPECT_EQ(trace_groups(jobs[1]).size(), 2U);
}

TEST(Trace, OrdersJobsOfOneSecondByTheirProcesses) {
  FlightRecord later = Story(0).record();
  later.identity.process_start = 900;
  FlightRecord earlier = Story(2).record();
  earlier.identity.process_start = 800;
  earlier.identity.connection = 5;
  const auto jobs = split_jobs({std::move(later), std::move(earlier)});
  ASSERT_EQ(jobs.size(), 2U);
  EXPECT_EQ(jobs[0][0].identity.rank, 2);
}

// Records of older builds have no connection number. Such records must count as one job if they are
// of one round of one group.
TEST(Trace, TakesRecordsThatKnowNoConnectionForOneJob) {
  const auto jobs = split_jobs(
      {Story(0).running(1, kReduce, 0).record(), Story(1).running(1, kReduce, 0).record()});
  EXPECT_EQ(jobs.size(), 1U);
  EXPECT_TRUE(split_jobs({}).empty());
}

TEST(Trace, TheTableHasEachRanksTimeInEachCollective) {
  const std::string text =
      to_text(trace_of({Story(0).done(1, kReduce, 2'000'000, 5'000'000).record(),
                        Story(1).done(1, kReduce, 3'000'000, 5'000'000).record()}),
              1);
  EXPECT_THAT(text, ::testing::ContainsRegex(
                        "#1 +all_reduce[^+\n]+\\+0\\.000 3\\.000 +\\+1\\.000 2\\.000"));
}

TEST(Trace, TellsProgramsTheSame) {
  const auto traces = trace_groups({Story(0, 2).running(1, kReduce, 0).record()});
  const auto json = nlohmann::json::parse(to_json(traces));
  ASSERT_EQ(json.size(), 1U);
  EXPECT_EQ(json[0]["stopped_at"], 1);
  EXPECT_EQ(json[0]["standings"][0]["standing"], "waited");
  EXPECT_EQ(json[0]["standings"][1]["standing"], "no record");
  EXPECT_EQ(json[0]["records"][0]["operations"][0]["state"], "running");
}

}  // namespace
}  // namespace cadre
