// Tests groups with a user-defined engine that completes its calls later, or that names a rank
// which does not exist. Also tests that close() waits for a callback that runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/collective/backend.h"
#include "cadre/core/comm/communicator.h"
#include "cadre/core/comm/groups/lone_group.h"
#include "cadre/testing/core/fake_stream_backend.h"
#include "cadre/testing/core/process_ranks.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr Duration kPatience = seconds(20);

// An engine of two ranks with the same input, so a sum is twice the input. A thread of the engine
// completes its calls one after the other, each when the gate opens. The engine cannot abort a
// call.
class LaterEngine final : public Backend {
 public:
  LaterEngine(os::System& system, std::shared_ptr<testing::FakeEvent> gate)
      : system_(system), gate_(std::move(gate)), thread_(system) {}
  Capabilities capabilities() const override {
    Capabilities can = full_capabilities("later");
    can.is_abortable = false;
    return can;
  }
  Completion submit(const OpContext& /*op*/, std::span<const Collective> collectives) override {
    const Completion done = Completion::make_pending();
    std::vector<Collective> calls(collectives.begin(), collectives.end());
    thread_.enqueue([this, done, calls = std::move(calls)] {
      gate_->wait(system_.deadline_in(kPatience));
      for (const Collective& call : calls) run(call);
      done.complete({});
    });
    return done;
  }

 private:
  static void run(const Collective& call) {
    if (call.kind != OpKind::kAllReduce) return;
    for (size_t at = 0; at < call.in.size(); at += sizeof(float)) {
      float value = 0;
      std::memcpy(&value, call.in.data() + at, sizeof(float));
      value *= 2;
      std::memcpy(call.out.data() + at, &value, sizeof(float));
    }
  }

  os::System& system_;
  const std::shared_ptr<testing::FakeEvent> gate_;
  testing::FakeStream thread_;
};

// An engine whose error names a rank that does not exist.
class StrayingEngine final : public Backend {
 public:
  explicit StrayingEngine(ErrorCode code) : code_(code) {}
  Capabilities capabilities() const override { return full_capabilities("straying"); }
  Completion submit(const OpContext& op, std::span<const Collective> /*collectives*/) override {
    op.progress.set_waiting_for(1 << 24);
    return Error(code_, "the library has lost a rank");
  }

 private:
  const ErrorCode code_;
};

class PluginEngineTest : public ::testing::Test {
 protected:
  template <typename Make>
  std::unique_ptr<Communicator> make_group(const Make& make) {
    CommunicatorOptions options;
    options.timeout = kPatience;
    options.backend = [make](const BackendSetup& setup) -> Result<std::unique_ptr<Backend>> {
      return std::unique_ptr<Backend>(make(setup));
    };
    return make_lone_group(system_, 2, options);
  }
  std::unique_ptr<Communicator> make_later_group() {
    return make_group([gate = gate_](const BackendSetup& setup) {
      return std::make_unique<LaterEngine>(setup.system, gate);
    });
  }
  Deadline soon() { return system_.deadline_in(kPatience); }
  void sleep(Duration duration) { system_.make_waiter()->park(system_.deadline_in(duration)); }

  os::System& system_ = testing::process_system();
  const std::shared_ptr<testing::FakeEvent> gate_ = std::make_shared<testing::FakeEvent>(system_);
};

Bytes bytes_of(float& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

// The group multiplies the input of a PREMUL_SUM, which is the output of an operation that the
// engine has not completed yet. So it must wait for that operation first.
TEST_F(PluginEngineTest, APremulSumReadsTheResultOfTheOperationBeforeIt) {
  const auto group = make_later_group();
  float x = 1;
  float y = 0;
  const Work first =
      group->all_reduce_async(bytes_of(x), bytes_of(x), DType::kFloat32, ReduceOp::kSum);
  const Work second =
      group->all_reduce_async(bytes_of(x), bytes_of(y), DType::kFloat32, Reduction::premul_sum(10));
  sleep(milliseconds(20));
  gate_->set();
  first.wait();
  second.wait();
  EXPECT_EQ(x, 2);
  EXPECT_EQ(y, 40);
  group->close(soon());
}

TEST_F(PluginEngineTest, AnAbortEndsAnAllocationAndLeavesTheEngineToTheProcess) {
  const auto result = testing::run_ranks_as_processes(1, [this](testing::RankContext&) {
    auto group = make_later_group();
    const auto aborter = system_.spawn("aborter", [&] {
      sleep(milliseconds(50));
      group->abort("the test");
    });
    const TimePoint begin = system_.now();
    const std::string failure = testing::failure_of([&] { group->allocate_symmetric(64); });
    aborter->join();
    testing::require(failure.find("abort() was called: the test") != std::string::npos, failure);
    group.reset();
    testing::require(system_.now() - begin < kPatience / 2, "the group waited for its engine");
  });
  EXPECT_TRUE(result.ok()) << result.failures();
}

TEST_F(PluginEngineTest, ARankThatDoesNotExistIsNotNamed) {
  for (const ErrorCode code :
       {ErrorCode::kTimeout, ErrorCode::kUnavailable, ErrorCode::kPeerLost}) {
    const auto group = make_group(
        [code](const BackendSetup& /*setup*/) { return std::make_unique<StrayingEngine>(code); });
    try {
      group->barrier();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      // The error of a timeout must still name a rank, because the ranks determine it without the
      // engine.
      EXPECT_EQ(error.details().culprit.has_value(), code == ErrorCode::kTimeout) << error.what();
    }
  }
}

// The operation has ended, but its callback still runs. close() must wait for the callback, and the
// group must not fail.
TEST_F(PluginEngineTest, ACallbackThatRunsIsNoPendingOperation) {
  gate_->set();
  const auto group = make_later_group();
  float x = 1;
  const Work work =
      group->all_reduce_async(bytes_of(x), bytes_of(x), DType::kFloat32, ReduceOp::kSum);
  std::atomic<bool> has_returned{false};
  work.on_completed([&](const std::optional<Error>&) {
    sleep(milliseconds(200));
    has_returned = true;
  });
  while (!work.is_completed()) system_.yield();
  group->close(system_.deadline_in(milliseconds(20)));
  EXPECT_TRUE(has_returned);
  EXPECT_FALSE(group->error().has_value()) << group->error()->what();
}

}  // namespace
}  // namespace cadre
