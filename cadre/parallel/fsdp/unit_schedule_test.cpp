// Tests when units are gathered and released, and how many are full at a time. The tests use a
// UnitMemory that only records its calls.
#include "cadre/parallel/fsdp/unit_schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"

namespace cadre::parallel {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Notes {
  std::vector<std::string> events;
  std::vector<std::string> full;
  std::vector<std::string> kept;  // the units released by release_onto_group()
  size_t peak = 0;
  std::optional<Error> refusal;  // an error that wait_full() throws, if set
  std::string fails;             // gather() of the unit with this name throws

  std::vector<std::string> take() { return std::exchange(events, {}); }
};

class NotedMemory final : public UnitMemory {
 public:
  NotedMemory(std::string name, Notes& notes) : name_(std::move(name)), notes_(notes) {}

  bool is_full() const override { return std::ranges::count(notes_.full, name_) > 0; }
  void gather() override {
    if (is_full() && !is_stale_) return;
    if (notes_.fails == name_) throw Error(ErrorCode::kInvalidArgument, "no memory");
    notes_.events.push_back("gather " + name_);
    if (!is_full()) notes_.full.push_back(name_);
    std::erase(notes_.kept, name_);
    is_stale_ = false;
    notes_.peak = std::max(notes_.peak, notes_.full.size());
  }
  void wait_full() override {
    if (fail) throw std::runtime_error("gather failed");
    if (notes_.refusal) throw notes_.refusal->with_context("gathering unit \"" + name_ + "\"");
  }
  void release() override {
    if (std::erase(notes_.kept, name_) > 0) notes_.events.push_back("drop the part of " + name_);
    if (!is_full()) return;
    notes_.events.push_back("release " + name_);
    std::erase(notes_.full, name_);
  }
  void release_onto_group() override {
    if (!is_full()) return;
    notes_.events.push_back("keep a part of " + name_);
    notes_.kept.push_back(name_);
    std::erase(notes_.full, name_);
  }
  void mark_stale() override { is_stale_ = true; }
  bool is_outdated() const override { return false; }

  static inline bool fail = false;

 private:
  std::string name_;
  Notes& notes_;
  bool is_stale_ = false;
};

// A model with a root and units "1" to "4", each with two trained parameters.
class ScheduleTest : public ::testing::Test {
 protected:
  static constexpr size_t kUnits = 5;
  using Call = std::shared_ptr<UnitSchedule::Call>;

  void make(Reshard reshard = Reshard::kAfterForward, int num_prefetched = 1,
            bool has_frozen = false) {
    std::vector<UnitSchedule::Unit> units;
    for (size_t unit = 0; unit < kUnits; ++unit) {
      const std::string name = unit == 0 ? "root" : std::to_string(unit);
      units.push_back({.name = name,
                       .memory = std::make_unique<NotedMemory>(name, notes_),
                       .reshard = unit == 0 ? Reshard::kAfterBackward : reshard,
                       .parameters = {2 * unit, 2 * unit + 1},
                       .has_frozen = has_frozen});
    }
    schedule_ = std::make_unique<UnitSchedule>(
        std::move(units),
        UnitSchedule::Options{.num_prefetched = num_prefetched,
                              .compare = [this](const UnitSchedule::Use&) { ++num_compared_; }});
  }

  // Runs a forward in which the output of each unit is the input of the next one. The input of unit
  // 1 does not require grad.
  std::vector<Call> forward(const std::vector<size_t>& order = {1, 2, 3, 4}, bool grad = true) {
    std::vector<Call> calls;
    schedule_->begin_forward(grad);
    for (const size_t unit : order) {
      calls.push_back(std::make_shared<UnitSchedule::Call>(UnitSchedule::Call{.unit = unit}));
      if (unit > 1) calls.back()->inputs = {node(unit - 1)};
      schedule_->before_forward(unit);
      schedule_->after_forward(unit);
    }
    schedule_->end_forward();
    return calls;
  }
  void backward(const std::vector<Call>& calls, bool is_reduced = true) {
    schedule_->begin_backward();
    schedule_->reached_output(root_call_, node(0));
    for (auto call = calls.rbegin(); call != calls.rend(); ++call) {
      const size_t unit = (*call)->unit;
      schedule_->reached_output(*call, node(unit));
      schedule_->gradient_arrived(2 * unit);
      schedule_->gradient_arrived(2 * unit + 1);
    }
    schedule_->end_backward({.is_reduced = is_reduced, .creates_graph = false});
  }
  static wrap::GraphNode node(size_t unit) { return {.address = nullptr, .sequence = unit}; }
  std::string error_of(const std::function<void()>& function) {
    try {
      function();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "no error";
  }

  Notes notes_;
  int num_compared_ = 0;
  Call root_call_ = std::make_shared<UnitSchedule::Call>(UnitSchedule::Call{.unit = 0});
  std::unique_ptr<UnitSchedule> schedule_;
};

TEST_F(ScheduleTest, GathersBeforeEachUseAndReleasesAfterIt) {
  make(Reshard::kAfterForward, /*num_prefetched=*/0);
  const auto calls = forward({1, 2});
  EXPECT_THAT(notes_.take(),
              ElementsAre("gather root", "gather 1", "release 1", "gather 2", "release 2"));
  backward(calls);
  EXPECT_THAT(notes_.take(),
              ElementsAre("gather 2", "release 2", "gather 1", "release 1", "release root"));
  EXPECT_EQ(notes_.peak, 2);
}

// If a backward throws on a rank, that rank must keep its parts of units 1 and 2, because other
// ranks still gather from them. If a forward throws, it must free them.
TEST_F(ScheduleTest, AFailedBackwardKeepsPartsOnGroupsAndAFailedForwardDoesNot) {
  for (const bool is_in_backward : {true, false}) {
    notes_ = {};
    make(Reshard::kOntoGroup, /*num_prefetched=*/0);
    forward({1, 2});
    if (is_in_backward) {
      schedule_->begin_backward();
    } else {
      schedule_->begin_forward(/*grad=*/true);
    }
    notes_.take();
    schedule_->abandon();
    EXPECT_EQ(notes_.kept.size(), is_in_backward ? 2 : 0);
  }
}

TEST_F(ScheduleTest, AGatherThatFailsNamesItsUnit) {
  make(Reshard::kAfterForward, /*num_prefetched=*/0);
  notes_.fails = "root";
  EXPECT_THAT(error_of([&] { forward({1}); }), HasSubstr("gathering the root's parameters: "));
  make(Reshard::kAfterForward, /*num_prefetched=*/0);
  notes_.fails = "1";
  EXPECT_THAT(error_of([&] { forward({1}); }), HasSubstr("gathering unit \"1\": "));
}

TEST_F(ScheduleTest, PrefetchesInTheOrderObserved) {
  make();
  backward(forward());
  notes_.take();
  const auto calls = forward();
  EXPECT_THAT(notes_.take(),
              ElementsAre("gather root", "gather 1", "gather 2", "release 1", "gather 3",
                          "release 2", "gather 4", "release 3", "release 4"));
  backward(calls);
  EXPECT_THAT(notes_.take(),
              ElementsAre("gather 4", "gather 3", "release 4", "gather 2", "release 3", "gather 1",
                          "release 2", "release 1", "release root"));
  EXPECT_EQ(notes_.peak, 3) << "the root and two units";
}

TEST_F(ScheduleTest, TheFirstBackwardPrefetchesInReverseOrder) {
  make();
  const auto calls = forward();
  notes_.take();
  backward(calls);
  EXPECT_THAT(notes_.take(),
              ElementsAre("gather 4", "gather 3", "release 4", "gather 2", "release 3", "gather 1",
                          "release 2", "release 1", "release root"));
}

TEST_F(ScheduleTest, KeepsUnitsUntilBackwardOrReduction) {
  make(Reshard::kAfterBackward, 0);
  const auto calls = forward({1, 2});
  EXPECT_THAT(notes_.take(), ElementsAre("gather root", "gather 1", "gather 2"));
  backward(calls, /*is_reduced=*/false);
  EXPECT_THAT(notes_.take(), ElementsAre("release 2", "release 1", "release root"));

  notes_ = {};
  make(Reshard::kAfterReduction, 0);
  backward(forward({1, 2}), /*is_reduced=*/false);
  EXPECT_THAT(notes_.take(), ElementsAre("gather root", "gather 1", "gather 2", "release root"));
  backward(forward({1, 2}));
  EXPECT_THAT(notes_.take(), ElementsAre("gather root", "release root", "release 1", "release 2"));
  EXPECT_THAT(notes_.full, IsEmpty());
}

TEST_F(ScheduleTest, KeepsAPartOfUnitsBetweenForwardAndBackward) {
  make(Reshard::kOntoGroup, 0);
  const auto calls = forward({1, 2});
  EXPECT_THAT(notes_.take(), ElementsAre("gather root", "gather 1", "keep a part of 1", "gather 2",
                                         "keep a part of 2"));
  backward(calls);
  EXPECT_THAT(notes_.take(),
              ElementsAre("gather 2", "release 2", "gather 1", "release 1", "release root"));
  forward({1}, /*grad=*/false);
  EXPECT_THAT(notes_.take(), ElementsAre("gather root", "gather 1", "release 1", "release root"))
      << "the next use gathers anew";
}

// The optimizer may step at any time after a reduction, so every later use must gather again, until
// a backward only accumulates.
TEST_F(ScheduleTest, GathersAgainAfterAReduction) {
  make(Reshard::kAfterReduction, 0);
  backward(forward({1}));
  notes_.take();
  forward({1}, /*grad=*/false);  // an evaluation before the step
  EXPECT_THAT(notes_.take(), ElementsAre("gather root", "gather 1", "release 1", "release root"));
  const auto calls = forward({1});
  EXPECT_THAT(notes_.take(), ElementsAre("gather root", "gather 1"));
  forward({1}, /*grad=*/false);
  EXPECT_THAT(notes_.take(), ElementsAre("gather root", "gather 1", "release 1", "release root"));
  backward(calls, /*is_reduced=*/false);
  EXPECT_THAT(notes_.take(), ElementsAre("gather root", "gather 1", "release root"));
  forward({1}, /*grad=*/false);
  EXPECT_THAT(notes_.take(), ElementsAre("gather root")) << "nothing was reduced since";
}

TEST_F(ScheduleTest, WaitsForTheInputsWhereParametersAreFrozen) {
  make(Reshard::kAfterForward, 0, /*has_frozen=*/true);
  const auto calls = forward({1, 2});
  notes_.take();
  schedule_->reached_output(calls[1], node(2));
  schedule_->gradient_arrived(4);
  schedule_->gradient_arrived(5);
  EXPECT_THAT(notes_.take(), ElementsAre("gather 2"));
  schedule_->reached_output(calls[0], node(1));  // the output of unit 1 is the input of unit 2
  EXPECT_THAT(notes_.take(), ElementsAre("release 2", "gather 1"));
  schedule_->gradient_arrived(2);
  schedule_->gradient_arrived(3);
  EXPECT_THAT(notes_.take(), IsEmpty()) << "its input has no gradient: the end is not seen";
  schedule_->end_backward({.is_reduced = true, .creates_graph = false});
  EXPECT_THAT(notes_.take(), ElementsAre("release root", "release 1"));
}

TEST_F(ScheduleTest, WaitsForTheGradientsWhereTheInputIsPassedFirst) {
  make(Reshard::kAfterForward, 0);
  const auto calls = forward({1, 2});
  schedule_->reached_output(calls[1], node(2));
  schedule_->gradient_arrived(4);
  schedule_->passed_input(*calls[1]);
  EXPECT_THAT(notes_.full, ElementsAre("root", "2"));
  schedule_->gradient_arrived(5);
  EXPECT_THAT(notes_.full, ElementsAre("root"));
}

TEST_F(ScheduleTest, KeepsAllForTheGraphOfADerivative) {
  make();
  auto calls = forward({1, 2});
  schedule_->reached_output(calls[1], node(2));
  schedule_->reached_output(calls[0], node(1));
  schedule_->end_backward({.is_reduced = false, .creates_graph = true});
  EXPECT_THAT(notes_.full, ElementsAre("root", "2", "1"));
  backward(calls);
  EXPECT_THAT(notes_.full, IsEmpty());
}

TEST_F(ScheduleTest, ComparesWhatWasNotExpected) {
  make();
  backward(forward());
  EXPECT_EQ(num_compared_, 5 + 1) << "each first use, and the begin of the first backward";
  num_compared_ = 0;
  backward(forward());
  EXPECT_EQ(num_compared_, 1) << "a forward after a backward";
  num_compared_ = 0;
  for (int step = 0; step < 3; ++step) backward(forward());
  EXPECT_EQ(num_compared_, 0);
  backward(forward({1, 3, 2, 4}));
  EXPECT_EQ(num_compared_, 2 + 2);
  num_compared_ = 0;
  forward({1, 3, 2, 4});
  EXPECT_EQ(num_compared_, 0);
  forward({1, 3, 2, 4});
  EXPECT_EQ(num_compared_, 1) << "a step whose backward is missing";
}

TEST_F(ScheduleTest, ComparesTheNextUseAfterAFailure) {
  make();
  for (int step = 0; step < 2; ++step) backward(forward());
  num_compared_ = 0;
  schedule_->begin_forward(true);
  schedule_->before_forward(1);
  schedule_->fail_forward(1);
  schedule_->abandon();
  EXPECT_THAT(notes_.full, IsEmpty());
  EXPECT_EQ(num_compared_, 0);
  backward(forward());
  EXPECT_EQ(num_compared_, 1);
}

TEST_F(ScheduleTest, ComputesAForwardAgainInsideBackward) {
  make(Reshard::kAfterForward, 0);
  forward({1, 2}, /*grad=*/true);
  notes_.take();
  schedule_->begin_backward();
  schedule_->before_forward(2);
  schedule_->after_forward(2);
  const auto call = std::make_shared<UnitSchedule::Call>(UnitSchedule::Call{.unit = 2});
  schedule_->reached_output(call, node(2));
  schedule_->gradient_arrived(4);
  schedule_->gradient_arrived(5);
  EXPECT_THAT(notes_.take(), ElementsAre("gather 2", "release 2")) << "gathered once";
  schedule_->end_backward({.is_reduced = true, .creates_graph = false});
}

TEST_F(ScheduleTest, RefusesUsesOutOfPlace) {
  make();
  EXPECT_THAT(error_of([&] { schedule_->before_forward(3); }),
              HasSubstr("unit \"3\" was called outside of the wrapper's forward()"));
  schedule_->begin_forward(true);
  EXPECT_THAT(error_of([&] { schedule_->begin_forward(true); }), HasSubstr("inside of itself"));
  EXPECT_THAT(error_of([&] { schedule_->summon(); }), HasSubstr("called inside forward()"));
  EXPECT_THAT(error_of([&] { schedule_->begin_backward(); }),
              HasSubstr("backward() was called inside forward()"));
  schedule_->end_forward();
  schedule_->begin_backward();
  EXPECT_THAT(error_of([&] { schedule_->summon(); }), HasSubstr("called inside backward()"));
  EXPECT_THAT(error_of([&] { schedule_->begin_forward(true); }),
              HasSubstr("forward() was called inside backward()"));
  schedule_->end_backward({.is_reduced = true, .creates_graph = false});
  schedule_->summon();
  EXPECT_EQ(notes_.full.size(), kUnits);
  EXPECT_THAT(error_of([&] { schedule_->summon(); }), HasSubstr("another FullParameters"));
  EXPECT_THAT(error_of([&] { schedule_->begin_forward(true); }),
              HasSubstr("First destroy the FullParameters"));
  EXPECT_THAT(error_of([&] { schedule_->begin_backward(); }),
              HasSubstr("First destroy the FullParameters"));
  schedule_->dismiss();
  EXPECT_THAT(notes_.full, IsEmpty());
  forward();
}

TEST_F(ScheduleTest, AFailedGatherLeavesNothingFull) {
  make();
  NotedMemory::fail = true;
  EXPECT_THROW(schedule_->summon(), std::runtime_error);
  NotedMemory::fail = false;
  EXPECT_THAT(notes_.full, IsEmpty());
  forward();
}

// The error that UnitMemory::wait_full() throws already contains the unit's name, so the schedule
// must not add it again.
TEST_F(ScheduleTest, AFailedGatherNamesItsUnitOnce) {
  make();
  notes_.refusal = Error(ErrorCode::kInvalidArgument, "refused");
  EXPECT_EQ(error_of([&] { forward(); }), "gathering unit \"root\": refused");
}

TEST_F(ScheduleTest, ARankThatHasLeftABackwardGathersWhatTheOthersGather) {
  make();
  const auto begin_backward = [this](const std::vector<Call>& calls, size_t num_units) {
    schedule_->begin_reduction();
    schedule_->begin_backward();
    schedule_->reached_output(root_call_, node(0));
    for (size_t k = 0; k < num_units; ++k) {
      const Call& call = calls[calls.size() - 1 - k];
      schedule_->reached_output(call, node(call->unit));
      schedule_->gradient_arrived(2 * call->unit);
      schedule_->gradient_arrived(2 * call->unit + 1);
      schedule_->count_launch();
    }
  };
  begin_backward(forward(), 1);
  schedule_->abandon();
  notes_.take();
  schedule_->follow_others(4);
  EXPECT_THAT(notes_.take(), IsEmpty()) << "nothing is known yet";
  for (int step = 0; step < 3; ++step) {
    begin_backward(forward(), 4);
    schedule_->end_backward({.is_reduced = true, .creates_graph = false});
  }
  begin_backward(forward(), 1);
  schedule_->abandon();
  notes_.take();
  schedule_->follow_others(1);
  EXPECT_THAT(notes_.take(), ElementsAre("gather 2"));
  schedule_->follow_others(2);
  EXPECT_THAT(notes_.take(), ElementsAre("gather 1", "release 2"));
  schedule_->follow_others(4);
  EXPECT_THAT(notes_.take(), IsEmpty());
  schedule_->begin_reduction();  // a reduction outside of a backward
  schedule_->follow_others(4);
  EXPECT_THAT(notes_.take(), IsEmpty());
}

}  // namespace
}  // namespace cadre::parallel
