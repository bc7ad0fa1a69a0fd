// Tests in virtual time how BootstrapWatch looks for failures in a slow store.
#include "cadre/core/fabric/bootstrap/watch.h"

#include <gtest/gtest.h>

#include "cadre/core/sim/simulator.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/control.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A store that takes `latency` to answer a read. A read whose deadline is earlier times out.
class SlowStore final : public Store {
 public:
  SlowStore(os::System& system, Duration latency)
      : Store(system), latency_(latency), inner_(system) {}

  Result<std::shared_ptr<Store>> clone(Deadline deadline) override {
    return inner_.clone(deadline);
  }

 private:
  Result<wire::StoreResponse> answer(wire::StoreRequest request, Deadline deadline) override {
    if (request.values.empty()) CADRE_RETURN_IF_ERROR(delay(deadline));
    return inner_.call(std::move(request), deadline);
  }
  Status delay(Deadline deadline) {
    const Deadline answer = system().deadline_in(latency_);
    system().make_waiter()->park(deadline.earlier(answer));
    if (answer.has_passed(system().now())) return {};
    return Error(ErrorCode::kTimeout, "the slow store did not answer in time");
  }

  const Duration latency_;
  HashStore inner_;
};

// Runs `body` with a watch over a slow store, in a world of one simulated rank.
void watch_slow_store(Duration latency,
                      const std::function<void(os::System&, SlowStore&, BootstrapWatch&)>& body) {
  sim::Simulator simulator(1, {.ranks_per_host = {1}});
  const sim::SimResult result = simulator.run([&](os::System& system, int) {
    const auto store = std::make_shared<SlowStore>(system, latency);
    const Membership membership{
        .rank = 0, .world_size = 2, .round = 1, .store = store, .job_token = "t", .job_size = 2};
    BootstrapWatch watch(system, membership, "cadre/1/world/");
    body(system, *store, watch);
  });
  EXPECT_EQ(result.failure, "");
  EXPECT_EQ(result.ranks[0].failure, "");
}

void report_trouble(os::System& system, Store& store) {
  const auto notice = wire::encode_control(
      wire::AbortNotice{ErrorCode::kInvalidArgument, 1, 1, "", "rank 1 is at fault"});
  store
      .set("cadre/1/world/trouble",
           wire::as_text(ConstBytes(notice).subspan(wire::kControlPrefixBytes)),
           system.deadline_in(seconds(1)))
      .value_or_throw();
}

// Polls an item that is always ready, again and again, for 10 s or until poll() returns false or an
// error.
Result<bool> poll_what_is_ready(os::System& system, BootstrapWatch& watch, Deadline deadline) {
  const auto event = system.make_event();
  event->notify();
  os::PollItem item{.target = event.get(), .want_read = true};
  const Deadline patience = system.deadline_in(seconds(10));
  Result<bool> is_ready = true;
  while (is_ready.ok() && *is_ready && !patience.has_passed(system.now())) {
    is_ready = watch.poll(std::span(&item, 1), deadline);
    system.make_waiter()->park(system.deadline_in(milliseconds(10)));
  }
  return is_ready;
}

TEST(BootstrapWatchTest, ValuesThatTakeLongToComeAreNotTrouble) {
  watch_slow_store(milliseconds(1500),
                   [](os::System& system, SlowStore& store, BootstrapWatch& watch) {
                     const std::vector<std::string> keys = {"a", "b"};
                     for (const std::string& key : keys) {
                       store.set(key, "address", system.deadline_in(seconds(1))).value_or_throw();
                     }
                     const auto values = watch.multi_get(keys, system.deadline_in(seconds(60)));
                     ASSERT_TRUE(values.ok()) << values.error().message();
                     EXPECT_EQ(*values, (std::vector<std::string>{"address", "address"}));
                   });
}

TEST(BootstrapWatchTest, APollOutlivesAStoreThatDoesNotAnswerInTime) {
  watch_slow_store(seconds(3), [](os::System& system, SlowStore&, BootstrapWatch& watch) {
    const auto event = system.make_event();
    os::PollItem item{.target = event.get(), .want_read = true};
    const TimePoint start = system.now();
    const auto is_ready = watch.poll(std::span(&item, 1), system.deadline_in(seconds(20)));
    ASSERT_TRUE(is_ready.ok()) << is_ready.error().message();
    EXPECT_FALSE(*is_ready);
    EXPECT_GE(system.now() - start, seconds(20));
  });
}

TEST(BootstrapWatchTest, TroubleThatASlowStoreHoldsIsTold) {
  watch_slow_store(
      milliseconds(1500), [](os::System& system, SlowStore& store, BootstrapWatch& watch) {
        report_trouble(system, store);
        const auto values =
            watch.multi_get(std::vector<std::string>{"never"}, system.deadline_in(seconds(60)));
        ASSERT_FALSE(values.ok());
        EXPECT_EQ(values.error().code(), ErrorCode::kInvalidArgument);
        EXPECT_EQ(values.error().message(), "rank 1 is at fault");
        EXPECT_EQ(values.error().details().culprit, 1);
      });
}

// Foreign processes that connect to a listener can make every poll() return at once. The deadline
// must still be checked.
TEST(BootstrapWatchTest, APollThatIsAlwaysReadyEndsAtTheDeadline) {
  watch_slow_store(milliseconds(10), [](os::System& system, SlowStore&, BootstrapWatch& watch) {
    const TimePoint start = system.now();
    const Result<bool> is_ready = poll_what_is_ready(system, watch, system.deadline_in(seconds(3)));
    ASSERT_TRUE(is_ready.ok()) << is_ready.error().message();
    EXPECT_FALSE(*is_ready);
    EXPECT_LT(system.now() - start, seconds(4));
  });
}

TEST(BootstrapWatchTest, APollThatIsAlwaysReadyTellsOfTrouble) {
  watch_slow_store(milliseconds(10),
                   [](os::System& system, SlowStore& store, BootstrapWatch& watch) {
                     report_trouble(system, store);
                     const Result<bool> is_ready =
                         poll_what_is_ready(system, watch, system.deadline_in(seconds(60)));
                     ASSERT_FALSE(is_ready.ok());
                     EXPECT_EQ(is_ready.error().message(), "rank 1 is at fault");
                   });
}

}  // namespace
}  // namespace cadre
