// Tests the errors after the end of a peer's process, both if processes can be watched and if they
// cannot (on a kernel or in a container without pidfd_open).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "cadre/core/comm/communicator.h"
#include "cadre/core/os/process_watcher.h"
#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/testing/core/forwarding_system.h"
#include "cadre/testing/core/ranks.h"

namespace cadre {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

class UnwatchableSystem final : public testing::ForwardingSystem, public os::ProcessWatcher {
 public:
  using ForwardingSystem::ForwardingSystem;
  uint64_t pid_namespace() override { return 1; }
  std::unique_ptr<os::Pollable> watch_process(int) override { return nullptr; }
};

// Ranks of a simulation run one at a time, so the log needs no lock.
class WatchLog final : public LogSink {
 public:
  void write(LogLevel, std::string_view, std::string_view message) override {
    text_ += std::string(message) + "\n";
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

TEST(ProcessWatch, WithoutItTheEndOfAConnectionShowsThatAPeerIsGone) {
  sim::Simulator simulator(
      1, {.ranks_per_host = {2}, .faults = {sim::Fault::kill(1, sim::When::at_time(seconds(30)))}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  const auto log = std::make_shared<WatchLog>();
  std::string failure;
  const auto result = simulator.run([&](os::System& simulated, int rank) {
    UnwatchableSystem system(simulated);
    const Membership membership{rank, 2, 1, store, "token"};
    CommunicatorOptions options;
    if (rank == 0) options.log = log;
    const auto group =
        Communicator::connect(system, membership, options, system.deadline_in(seconds(20)));
    group->barrier();
    if (rank == 1) system.make_waiter()->park(system.deadline_in(hours(1)));
    failure = testing::failed_fields_of(
        [&] { group->barrier({.deadline = system.deadline_in(hours(1))}); });
    testing::require(system.now() < TimePoint{} + seconds(35), "rank 0 noticed it at once");
    group->close(system.deadline_in(seconds(5)));
  });
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.ranks[0].failure, "");
  EXPECT_EQ(failure, "kPeerLost culprit=1 operation=barrier#2");
  EXPECT_THAT(log->text(), HasSubstr("cannot watch the process of rank=1 "));
}

// A System that reports the end of a peer's process when the test requests it.
class EndingSystem final : public testing::ForwardingSystem, public os::ProcessWatcher {
 public:
  using ForwardingSystem::ForwardingSystem;
  uint64_t pid_namespace() override { return 1; }
  std::unique_ptr<os::Pollable> watch_process(int) override {
    auto event = inner_.make_event();
    end_ = event.get();
    return event;
  }
  void end_process() { end_->notify(); }

 private:
  os::Event* end_ = nullptr;
};

TEST(ProcessWatch, ALeaveThatIsReadAfterTheEndOfItsProcessStillCounts) {
  sim::Simulator simulator(1, {.ranks_per_host = {2}});
  const auto store = std::make_shared<HashStore>(simulator.system(0));
  std::string failure;
  const auto result = simulator.run([&](os::System& simulated, int rank) {
    EndingSystem system(simulated);
    const auto group = Communicator::connect(system, {rank, 2, 1, store, "token"}, {},
                                             system.deadline_in(seconds(20)));
    group->barrier();
    const auto pause = [&system](Duration time) {
      system.make_waiter()->park(system.deadline_in(time));
    };
    if (rank == 1) {
      pause(milliseconds(1050));
    } else {
      pause(seconds(1));
      system.end_process();
      pause(seconds(1));
      failure = testing::failed_fields_of([&] { group->barrier(); });
    }
    group->close(system.deadline_in(seconds(5)));
  });
  EXPECT_EQ(result.failure, "");
  for (const sim::RankEnd& rank : result.ranks) EXPECT_EQ(rank.failure, "");
  EXPECT_THAT(failure,
              ::testing::AnyOf("kPeerLost culprit=1 operation=barrier#2", "kPeerLost culprit=1"));
}

}  // namespace
}  // namespace cadre
