// Each verb as programs call it: its result, and its error as an exception.
#include "cadre/core/store/timed/timed_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/os/system.h"
#include "cadre/core/store/hash_store.h"
#include "cadre/core/store/tcp/tcp_store_server.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::StartsWith;

constexpr Duration kTime = std::chrono::seconds(20);

class TimedStoreTest : public ::testing::Test {
 protected:
  const std::unique_ptr<os::System> system_ = os::make_native_system();
  const TimedStore store_{*system_, std::make_shared<HashStore>(*system_), kTime};
};

TEST_F(TimedStoreTest, EachVerbReturnsItsResult) {
  const std::vector<std::string> both = {"a", "b"};
  store_.set("a", "1");
  EXPECT_FALSE(store_.check(both));
  store_.append("b", "2");
  store_.wait(both);
  EXPECT_EQ(store_.get("a"), "1");
  EXPECT_EQ(store_.add("a", 4), 5);
  EXPECT_EQ(store_.compare_set("b", "2", "3"), "3");
  EXPECT_THAT(store_.multi_get(both), ElementsAre("5", "3"));
  EXPECT_EQ(store_.num_keys(), 2);
  store_.multi_set(both, std::vector<std::string>{"x", "y"});
  EXPECT_THAT(store_.list_keys(), ElementsAre("a", "b"));
  EXPECT_TRUE(store_.erase("a"));
  EXPECT_FALSE(store_.erase("a"));
  store_.queue_push("q", "first");
  store_.queue_push("q", "second");
  EXPECT_EQ(store_.queue_length("q"), 2);
  EXPECT_EQ(store_.queue_pop("q"), "first");
  EXPECT_EQ(store_.try_queue_pop("q"), "second");
  EXPECT_EQ(store_.try_queue_pop("q"), std::nullopt);
  store_.barrier("one", 1);
}

TEST_F(TimedStoreTest, ACallThrowsAfterItsOwnTimeOrThatOfTheStore) {
  const TimePoint begin = system_->now();
  EXPECT_THAT(testing::failure_of([&] { store_.get("never", milliseconds(20)); }),
              StartsWith("kTimeout: store get: "));
  const TimedStore hasty(*system_, store_.store(), milliseconds(20));
  EXPECT_THAT(testing::failure_of([&] { hasty.barrier("two", 2); }),
              StartsWith("kTimeout: store barrier \"two\": 1 of 2 calls"));
  EXPECT_LT(system_->now() - begin, kTime / 2);
  EXPECT_THAT(testing::failure_of([&] { store_.barrier("none", 0); }),
              StartsWith("kInvalidArgument: "));
}

TEST_F(TimedStoreTest, NoStoreIsRefused) {
  EXPECT_THAT(
      testing::failure_of([this] { TimedStore(*system_, nullptr, std::chrono::seconds(1)); }),
      StartsWith("kInvalidArgument: TimedStore: the store is null"));
}

TEST_F(TimedStoreTest, APrefixHidesOtherKeysAndHasTheSameTime) {
  store_.set("mine/a", "1");
  store_.set("a", "2");
  const TimedStore mine = store_.with_prefix("mine");
  EXPECT_EQ(mine.get("a"), "1");
  EXPECT_THAT(mine.list_keys(), ElementsAre("a"));
  EXPECT_EQ(mine.with_prefix("deep").compare_set("b", "", "3"), "3");
  EXPECT_EQ(store_.get("mine/deep/b"), "3");
}

TEST_F(TimedStoreTest, StoresOverTcpAndInAFileAreOpened) {
  const auto server = TcpStoreServer::start(*system_, {.token = "secret"}).value_or_throw();
  const TcpStoreOptions options{.address = server->address(), .token = "secret"};
  TimedStore::connect(*system_, options, kTime).set("k", "tcp");
  EXPECT_EQ(TimedStore::connect(*system_, options, kTime).get("k"), "tcp");
  const TcpStoreOptions strange{.address = server->address(), .token = "another"};
  EXPECT_THAT(testing::failure_of([&] { TimedStore::connect(*system_, strange, kTime); }),
              StartsWith("kInvalidArgument: "));
  const testing::TemporaryFolder folder;
  const TimedStore file = TimedStore::open(*system_, {.path = folder.file("store")}, kTime);
  file.set("k", "file");
  EXPECT_EQ(TimedStore::open(*system_, {.path = folder.file("store")}, kTime).get("k"), "file");
}

}  // namespace
}  // namespace cadre
