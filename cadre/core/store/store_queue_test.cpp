// Tests, for each implementation of Store, the required behaviour of queues, barriers, list_keys()
// and clone(). store_conformance_test.cpp has the rest of the suite and the list of
// implementations.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <set>

#include "cadre/core/base/format.h"
#include "cadre/testing/core/store_conformance.h"

namespace cadre {
namespace {

TEST_P(StoreConformance, QueuesGiveFirstInFirstOutAndTellWhenTheyAreEmpty) {
  EXPECT_EQ(store_->queue_length("q", soon()).value(), 0);
  EXPECT_EQ(store_->try_queue_pop("q", soon()).value(), std::nullopt);
  const std::string bytes("\0\xff", 2);
  for (const std::string& item : {std::string("one"), bytes, std::string()}) {
    EXPECT_OK(store_->queue_push("q", item, soon()));
  }
  EXPECT_EQ(store_->queue_length("q", soon()).value(), 3);
  EXPECT_EQ(store_->queue_pop("q", soon()).value(), "one");
  EXPECT_EQ(store_->try_queue_pop("q", soon()).value(), bytes);
  EXPECT_EQ(store_->queue_pop("q", soon()).value(), "");
  EXPECT_EQ(store_->queue_length("q", soon()).value(), 0);
  EXPECT_EQ(store_->try_queue_pop("q", soon()).value(), std::nullopt);
}

TEST_P(StoreConformance, AQueueIsNoKeyButCountsForWaitAndCheckWhileItIsNotEmpty) {
  const std::vector<std::string> both = {"key", "queue"};
  const int64_t before = store_->num_keys(soon()).value();
  EXPECT_OK(store_->queue_push("queue", "item", soon()));
  EXPECT_EQ(store_->num_keys(soon()).value(), before);
  EXPECT_FALSE(store_->check(both, soon()).value());
  EXPECT_OK(store_->set("key", "", soon()));
  EXPECT_TRUE(store_->check(both, soon()).value());
  EXPECT_OK(store_->wait(both, soon()));
  EXPECT_EQ(store_->queue_pop("queue", soon()).value(), "item");
  EXPECT_FALSE(store_->check(both, soon()).value());
}

TEST_P(StoreConformance, GetOfAQueueIsRefusedByName) {
  EXPECT_OK(store_->queue_push("work/queue", "item", soon()));
  EXPECT_OK(store_->set("key", "value", soon()));
  const auto value = store_->get("work/queue", soon());
  const auto values = store_->multi_get(std::vector<std::string>{"key", "work/queue"}, soon());
  if (std::string(GetParam().name) == "TcpStoreC10d") {
    // c10d's protocol has no error responses. So get() of a queue returns an empty value, as it
    // does from torch's server.
    EXPECT_EQ(value.value(), "");
    EXPECT_EQ(values.value(), (std::vector<std::string>{"value", ""}));
    return;
  }
  for (const Error& error : {value.error(), values.error()}) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(error.message().find("work/queue\" names a queue"), std::string::npos)
        << error.message();
    EXPECT_NE(error.message().find("queue_pop"), std::string::npos) << error.message();
  }
  EXPECT_EQ(store_->queue_pop("work/queue", soon()).value(), "item");
}

TEST_P(StoreConformance, PopWaitsForAPushAndTimesOutWithTheQueuesName) {
  const auto other = harness_->open();
  const auto none = store_->queue_pop("work/left", at_once());
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code(), ErrorCode::kTimeout);
  EXPECT_NE(none.error().message().find("work/left"), std::string::npos) << none.error().message();
  std::string got;
  run_together({[&] { got = store_->queue_pop("work/left", soon()).value(); },
                [&] { EXPECT_OK(other->queue_push("work/left", "task", soon())); }});
  EXPECT_EQ(got, "task");
  // The pop that timed out must not take the item that is pushed later.
  EXPECT_OK(store_->queue_push("work/left", "next", soon()));
  EXPECT_EQ(store_->queue_length("work/left", soon()).value(), 1);
}

// Each item is pushed at about the time when a pop times out. Either that pop must return the item,
// or the item must stay in the queue for the next pop.
TEST_P(StoreConformance, NoItemIsLostWhenPopsTimeOut) {
  // A c10d client must reconnect after a timeout, so its pops get more time and the test fewer
  // items.
  const bool is_c10d = std::string(GetParam().name) == "TcpStoreC10d";
  const Duration patience = milliseconds(is_c10d ? 20 : 1);
  const int num_items = is_c10d ? 30 : 400;
  const auto other = harness_->open();
  std::vector<std::string> got;
  std::atomic<bool> has_pushed_all = false;
  const auto pop_all = [&] {
    while (!has_pushed_all) {
      const auto item = store_->queue_pop("jobs", system_->deadline_in(patience));
      if (item.ok()) got.push_back(*item);
    }
    while (const auto item = store_->try_queue_pop("jobs", soon()).value_or_throw()) {
      got.push_back(*item);
    }
  };
  const auto push_all = [&] {
    const auto waiter = system_->make_waiter();
    for (int i = 0; i < num_items; ++i) {
      waiter->park(system_->deadline_in(patience * (i % 16) / 8));
      EXPECT_OK(other->queue_push("jobs", std::to_string(i), soon()));
    }
    has_pushed_all = true;
  };
  run_together({pop_all, push_all});
  ASSERT_EQ(got.size(), static_cast<size_t>(num_items));
  for (int i = 0; i < num_items; ++i) EXPECT_EQ(got[static_cast<size_t>(i)], std::to_string(i));
}

TEST_P(StoreConformance, EveryItemGoesToExactlyOneOfManyPoppers) {
  constexpr int kPoppers = 3;
  constexpr int kItems = 30;
  std::vector<std::vector<std::string>> got(kPoppers);
  std::vector<std::function<void()>> bodies;
  for (int p = 0; p < kPoppers; ++p) {
    bodies.push_back([&, p] {
      const auto mine = harness_->open();
      for (int i = 0; i < kItems / kPoppers; ++i) {
        got[p].push_back(mine->queue_pop("jobs", soon()).value());
      }
    });
  }
  bodies.push_back([&] {
    const auto mine = harness_->open();
    for (int i = 0; i < kItems; ++i) EXPECT_OK(mine->queue_push("jobs", std::to_string(i), soon()));
  });
  run_together(std::move(bodies));
  std::multiset<int> all;
  for (const auto& part : got) {
    for (const std::string& item : part) all.insert(std::stoi(item));
  }
  ASSERT_EQ(all.size(), static_cast<size_t>(kItems));
  int expected = 0;
  for (const int item : all) EXPECT_EQ(item, expected++);
  EXPECT_EQ(store_->queue_length("jobs", soon()).value(), 0);
}

TEST_P(StoreConformance, ABarrierHoldsAllUntilTheLastHasCome) {
  constexpr int kRanks = 4;
  std::atomic<int> arrived = 0;
  std::vector<std::function<void()>> bodies;
  for (int rank = 0; rank < kRanks; ++rank) {
    bodies.push_back([&] {
      const auto mine = harness_->open();
      arrived.fetch_add(1);
      EXPECT_OK(mine->barrier("meet", kRanks, soon()));
      EXPECT_EQ(arrived.load(), kRanks);
    });
  }
  run_together(std::move(bodies));
}

TEST_P(StoreConformance, ABarrierThatNotAllReachTimesOutAndOfOnePassesAtOnce) {
  const Status alone = store_->barrier("too few", 2, at_once());
  ASSERT_FALSE(alone.ok());
  EXPECT_EQ(alone.error().code(), ErrorCode::kTimeout);
  EXPECT_NE(alone.error().message().find("too few"), std::string::npos) << alone.error().message();
  EXPECT_OK(store_->barrier("one", 1, soon()));
  EXPECT_EQ(store_->barrier("none", 0, soon()).error().code(), ErrorCode::kInvalidArgument);
}

TEST_P(StoreConformance, ListKeysNamesEveryKeyThatIsSet) {
  const auto listed = [&] {
    std::vector<std::string> own;
    const auto keys = store_->list_keys(soon()).value();
    for (const std::string& key : keys) {
      if (key.starts_with("list/")) own.push_back(key);
    }
    return own;
  };
  EXPECT_EQ(listed(), std::vector<std::string>());
  const std::string odd("list/\0\xff", 7);
  for (const std::string& key : {std::string("list/b"), odd, std::string("list/a")}) {
    EXPECT_OK(store_->set(key, "v", soon()));
  }
  EXPECT_OK(store_->queue_push("list/queue", "item", soon()));
  EXPECT_EQ(listed(), (std::vector<std::string>{odd, "list/a", "list/b"}));
  EXPECT_TRUE(store_->erase("list/a", soon()).value());
  EXPECT_EQ(listed(), (std::vector<std::string>{odd, "list/b"}));
}

TEST_P(StoreConformance, ACloneSeesTheSameKeysAndOutlivesTheFirst) {
  const auto other = store_->clone(soon()).value_or_throw();
  EXPECT_OK(store_->set("k", "v", soon()));
  EXPECT_EQ(other->get("k", soon()).value(), "v");
  EXPECT_EQ(other->add("n", 2, soon()).value(), 2);
  store_.reset();
  EXPECT_EQ(other->add("n", 3, soon()).value(), 5);
  EXPECT_EQ(other->get("k", soon()).value(), "v");
}

// A forked child shares the connections and locks of its parent, and each would read answers to
// requests of the other. So calls in the child must fail, except clone().
TEST_P(StoreConformance, AForkedChildMayOnlyCloneAndLeavesTheStoreToItsParent) {
  const std::string name = GetParam().name;
  // The child has its own copy of the keys.
  if (name == "HashStore" || name == "PrefixStore") return;
  EXPECT_OK(store_->set("k", "parent", soon()));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto refused = store_->get("k", soon());
    const auto own = store_->clone(soon());
    const bool is_right = !refused.ok() && refused.error().code() == ErrorCode::kInvalidArgument &&
                          own.ok() && (*own)->set("k", "child", soon()).ok();
    store_.reset();
    ::_exit(is_right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(store_->get("k", soon()).value(), "child");
  EXPECT_OK(store_->set("k", "again", soon()));
}

TEST_P(StoreConformance, QueuesAndBarriersRefuseKeysOverTheLimit) {
  const std::string long_key(kMaxStoreKeyBytes + 1, 'k');
  const auto refused = [](const auto& result) {
    return !result.ok() && result.error().code() == ErrorCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused(store_->queue_push(long_key, "", soon())));
  EXPECT_TRUE(refused(store_->queue_push("q", std::string(kMaxStoreValueBytes + 1, 'x'), soon())));
  EXPECT_TRUE(refused(store_->queue_pop(long_key, soon())));
  EXPECT_TRUE(refused(store_->try_queue_pop(long_key, soon())));
  EXPECT_TRUE(refused(store_->queue_length(long_key, soon())));
  EXPECT_TRUE(refused(store_->barrier(long_key, 1, soon())));
}

}  // namespace
}  // namespace cadre
