// Tests, for each implementation of Store, the required behaviour of the operations on keys
// and values.
#include "cadre/testing/core/store_conformance.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST_P(StoreConformance, SetThenGetReturnsTheLastValue) {
  EXPECT_OK(store_->set("color", "red", soon()));
  EXPECT_OK(store_->set("color", "blue", soon()));
  EXPECT_EQ(store_->get("color", soon()).value(), "blue");
}

TEST_P(StoreConformance, KeysAndValuesAreBytesNotText) {
  const std::string key("a\0b/\xff\n", 6);
  const std::string value("\0\x01\xfe\0", 4);
  EXPECT_OK(store_->set(key, value, soon()));
  EXPECT_OK(store_->set("empty", "", soon()));
  EXPECT_EQ(store_->get(key, soon()).value(), value);
  EXPECT_EQ(store_->get("empty", soon()).value(), "");
}

TEST_P(StoreConformance, GetOfAMissingKeyTimesOutAndNamesIt) {
  const auto value = store_->get("nobody/sets/this", at_once());
  ASSERT_FALSE(value.ok());
  EXPECT_EQ(value.error().code(), ErrorCode::kTimeout);
  EXPECT_NE(value.error().message().find("nobody/sets/this"), std::string::npos)
      << value.error().message();
}

// The error of a timeout must name the verb that the caller called, even if the store sends other
// requests to implement it.
TEST_P(StoreConformance, ATimeoutNamesItsVerbAndWhatIsMissing) {
  EXPECT_OK(store_->set("set", "", soon()));
  const std::vector<std::string> keys = {"set", "gone/b", "gone/c"};
  const auto text_of = [](const auto& result) {
    return result.ok() ? std::string("ok") : result.error().message();
  };
  const std::string of_wait = text_of(store_->wait(keys, at_once()));
  const std::string of_values = text_of(store_->multi_get(keys, at_once()));
  const std::string of_pop = text_of(store_->queue_pop("jobs", at_once()));
  const std::string of_barrier = text_of(store_->barrier("meet", 2, at_once()));
  EXPECT_THAT(of_wait, StartsWith("store wait: "));
  EXPECT_THAT(of_values, StartsWith("store multi_get: "));
  EXPECT_THAT(of_pop, AllOf(StartsWith("store queue_pop: "), HasSubstr("jobs\"")));
  EXPECT_THAT(of_barrier, AllOf(StartsWith("store barrier \""), HasSubstr("meet\"")));
  for (const std::string& text : {of_wait, of_values}) {
    EXPECT_THAT(text, AllOf(HasSubstr("gone/b\""), HasSubstr("gone/c\"")));
    // c10d's protocol does not report which of the keys are set, so the error names all of them.
    if (std::string(GetParam().name) == "TcpStoreC10d") continue;
    EXPECT_THAT(text, Not(HasSubstr("set\",")));
    EXPECT_THAT(text, HasSubstr("of 3 keys"));
  }
  if (std::string(GetParam().name) == "TcpStoreC10d") return;
  EXPECT_THAT(of_barrier, HasSubstr("1 of 2 calls"));
}

TEST_P(StoreConformance, TheStoreWorksAfterATimeout) {
  for (int i = 0; i < 3; ++i) {
    ASSERT_FALSE(store_->get("late", system_->deadline_in(milliseconds(5))).ok());
  }
  EXPECT_OK(store_->set("late", "here", soon()));
  EXPECT_EQ(store_->get("late", soon()).value(), "here");
  EXPECT_EQ(store_->add("counter", 2, soon()).value(), 2);
}

TEST_P(StoreConformance, GetWaitsForAnotherRanksSet) {
  const auto other = harness_->open();
  std::string got;
  run_together({[&] { got = store_->get("handshake", soon()).value(); },
                [&] { EXPECT_OK(other->set("handshake", "done", soon())); }});
  EXPECT_EQ(got, "done");
}

TEST_P(StoreConformance, AWaitOfOneThreadDoesNotDelayAnothersCalls) {
  std::string got;
  std::atomic<int> done = 0;
  run_together({[&] { got = store_->get("last", soon()).value(); },
                [&] {
                  for (int i = 0; i < 50; ++i) {
                    EXPECT_OK(store_->set(format("key {}", i), "x", soon()));
                    done.fetch_add(1);
                  }
                  EXPECT_OK(store_->set("last", "end", soon()));
                }});
  EXPECT_EQ(got, "end");
  EXPECT_EQ(done.load(), 50);
}

TEST_P(StoreConformance, WaitIsForAllKeysInWhateverOrderTheyCome) {
  const auto other = harness_->open();
  const std::vector<std::string> keys = {"a", "b", "c"};
  EXPECT_OK(store_->set("b", "", soon()));
  EXPECT_FALSE(store_->check(keys, soon()).value());
  const Status early = store_->wait(keys, at_once());
  ASSERT_FALSE(early.ok());
  EXPECT_EQ(early.error().code(), ErrorCode::kTimeout);
  run_together({[&] { EXPECT_OK(store_->wait(keys, soon())); },
                [&] {
                  EXPECT_OK(other->set("c", "", soon()));
                  EXPECT_OK(other->set("a", "", soon()));
                }});
  EXPECT_TRUE(store_->check(keys, soon()).value());
}

TEST_P(StoreConformance, EveryWaitForSeveralKeysEndsAtItsDeadline) {
  EXPECT_OK(store_->set("there", "", soon()));
  const std::vector<std::string> keys = {"there", "never/set"};
  const Status waited = store_->wait(keys, at_once());
  const auto values = store_->multi_get(keys, at_once());
  ASSERT_FALSE(waited.ok());
  ASSERT_FALSE(values.ok());
  EXPECT_EQ(waited.error().code(), ErrorCode::kTimeout);
  EXPECT_EQ(values.error().code(), ErrorCode::kTimeout);
}

// Tests each change that makes a key appear while several callers wait for it.
TEST_P(StoreConformance, EveryWaiterIsWokenByWhateverMakesTheKeyAppear) {
  const std::vector<std::pair<std::string, std::function<Status(Store&, const std::string&)>>>
      changes = {{"set", [&](Store& store,
                             const std::string& key) { return store.set(key, "v", soon()); }},
                 {"multi_set",
                  [&](Store& store, const std::string& key) {
                    const std::vector<std::string> keys = {"before " + key, key};
                    const std::vector<std::string> values = {"", "v"};
                    return store.multi_set(keys, values, soon());
                  }},
                 {"add",
                  [&](Store& store, const std::string& key) {
                    const auto sum = store.add(key, 1, soon());
                    return sum.ok() ? Status() : Status(sum.error());
                  }},
                 {"append", [&](Store& store,
                                const std::string& key) { return store.append(key, "v", soon()); }},
                 {"compare_set",
                  [&](Store& store, const std::string& key) {
                    const auto holder = store.compare_set(key, "", "v", soon());
                    return holder.ok() ? Status() : Status(holder.error());
                  }},
                 {"queue_push", [&](Store& store, const std::string& key) {
                    return store.queue_push(key, "v", soon());
                  }}};
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    // A c10d client that waits for a queue will pop an item, so each push wakes only one such
    // client.
    const bool is_of_one = std::string(GetParam().name) == "TcpStoreC10d" && name == "queue_push";
    const std::vector<std::string> keys = {"awaited by " + name};
    const auto wait = [&] { EXPECT_OK(harness_->open()->wait(keys, soon())); };
    const size_t num_waiters = is_of_one ? 1 : 3;
    std::vector<std::function<void()>> bodies(num_waiters, wait);
    bodies.push_back([&, &change = change] {
      const auto other = harness_->open();
      system_->make_waiter()->park(at_once());  // lets the other threads begin to wait first
      EXPECT_OK(change(*other, keys[0]));
    });
    run_together(std::move(bodies));
  }
}

TEST_P(StoreConformance, ConcurrentAddsLoseNothing) {
  constexpr int kThreads = 4;
  constexpr int kAdds = 50;
  std::vector<std::vector<int64_t>> seen(kThreads);
  std::vector<std::function<void()>> bodies;
  for (int t = 0; t < kThreads; ++t) {
    bodies.push_back([&, t] {
      const auto mine = harness_->open();
      for (int i = 0; i < kAdds; ++i) seen[t].push_back(mine->add("n", 3, soon()).value());
    });
  }
  run_together(std::move(bodies));
  EXPECT_EQ(store_->get("n", soon()).value(), std::to_string(3 * kThreads * kAdds));
  std::vector<int64_t> all;
  for (const auto& part : seen) all.insert(all.end(), part.begin(), part.end());
  std::sort(all.begin(), all.end());
  for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], 3 * static_cast<int64_t>(i + 1));
}

TEST_P(StoreConformance, AddCountsDownAndContinuesASetNumber) {
  EXPECT_OK(store_->set("n", "40", soon()));
  EXPECT_EQ(store_->add("n", 2, soon()).value(), 42);
  EXPECT_EQ(store_->add("n", -50, soon()).value(), -8);
  EXPECT_EQ(store_->get("n", soon()).value(), "-8");
}

TEST_P(StoreConformance, CompareSetCreatesReplacesAndReportsTheHolder) {
  EXPECT_EQ(store_->compare_set("leader", "", "rank 1", soon()).value(), "rank 1");
  EXPECT_EQ(store_->compare_set("leader", "", "rank 2", soon()).value(), "rank 1");
  EXPECT_EQ(store_->compare_set("leader", "rank 1", "rank 3", soon()).value(), "rank 3");
  EXPECT_EQ(store_->compare_set("absent", "something", "new", soon()).value(), "something");
  // compare_set() of an absent key returns the expected value, here equal to the desired one, and
  // must not set the key.
  EXPECT_EQ(store_->compare_set("absent", "same", "same", soon()).value(), "same");
  for (const auto& handle : {store_, harness_->open()}) {
    EXPECT_FALSE(handle->check(std::vector<std::string>{"absent"}, soon()).value());
  }
}

TEST_P(StoreConformance, OneOfManyWinsACompareSet) {
  constexpr int kThreads = 4;
  std::vector<std::string> results(kThreads);
  std::vector<std::function<void()>> bodies;
  for (int t = 0; t < kThreads; ++t) {
    bodies.push_back([&, t] {
      results[t] = harness_->open()->compare_set("winner", "", std::to_string(t), soon()).value();
    });
  }
  run_together(std::move(bodies));
  // One caller has set its value. All callers must get that value as the result.
  const std::string winner = store_->get("winner", soon()).value();
  EXPECT_EQ(winner.size(), 1u);
  EXPECT_NE(std::string("0123").find(winner), std::string::npos) << winner;
  for (const std::string& result : results) EXPECT_EQ(result, winner);
}

TEST_P(StoreConformance, EraseTellsWhetherTheKeyWasThere) {
  const int64_t before = store_->num_keys(soon()).value();
  EXPECT_OK(store_->set("k", "v", soon()));
  EXPECT_EQ(store_->num_keys(soon()).value(), before + 1);
  EXPECT_TRUE(store_->erase("k", soon()).value());
  EXPECT_FALSE(store_->erase("k", soon()).value());
  EXPECT_EQ(store_->num_keys(soon()).value(), before);
  EXPECT_EQ(store_->get("k", at_once()).error().code(), ErrorCode::kTimeout);
}

TEST_P(StoreConformance, AppendStartsEmptyAndWakesWaiters) {
  const auto other = harness_->open();
  std::string got;
  run_together({[&] { got = store_->get("log", soon()).value(); },
                [&] { EXPECT_OK(other->append("log", "one,", soon())); }});
  EXPECT_EQ(got, "one,");
  EXPECT_OK(store_->append("log", "two", soon()));
  EXPECT_EQ(store_->get("log", soon()).value(), "one,two");
}

TEST_P(StoreConformance, MultiSetAndMultiGetKeepTheOrder) {
  std::vector<std::string> keys;
  std::vector<std::string> values;
  for (int i = 0; i < 100; ++i) {
    keys.push_back(format("k{}", i));
    values.push_back(format("value {}", i * i));
  }
  const auto other = harness_->open();
  std::vector<std::string> got;
  run_together({[&] { got = store_->multi_get(keys, soon()).value(); },
                [&] { EXPECT_OK(other->multi_set(keys, values, soon())); }});
  EXPECT_EQ(got, values);
  EXPECT_EQ(store_->multi_get({}, soon()).value(), std::vector<std::string>());
}

TEST_P(StoreConformance, AValueAtTheLimitPassesAndOneOverItIsRefused) {
  std::string big(kMaxStoreValueBytes, '\0');
  for (size_t i = 0; i < big.size(); i += 997) big[i] = static_cast<char>(i);
  EXPECT_OK(store_->set("big", big, soon()));
  const auto back = store_->get("big", soon());
  EXPECT_OK(back);
  EXPECT_TRUE(back.value() == big);
  big.push_back('x');
  EXPECT_EQ(store_->set("bigger", big, soon()).error().code(), ErrorCode::kInvalidArgument);
  EXPECT_FALSE(store_->check(std::vector<std::string>{"bigger"}, soon()).value());
}

TEST_P(StoreConformance, KeysOverTheLimitAreRefusedByEveryVerb) {
  const std::string long_key(kMaxStoreKeyBytes + 1, 'k');
  const std::vector<std::string> keys = {long_key};
  const auto refused = [](const auto& result) {
    return !result.ok() && result.error().code() == ErrorCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused(store_->set(long_key, "", soon())));
  EXPECT_TRUE(refused(store_->get(long_key, soon())));
  EXPECT_TRUE(refused(store_->add(long_key, 1, soon())));
  EXPECT_TRUE(refused(store_->wait(keys, soon())));
  EXPECT_TRUE(refused(store_->check(keys, soon())));
  EXPECT_TRUE(refused(store_->compare_set(long_key, "", "", soon())));
  EXPECT_TRUE(refused(store_->erase(long_key, soon())));
  EXPECT_TRUE(refused(store_->append(long_key, "", soon())));
  EXPECT_TRUE(refused(store_->multi_get(keys, soon())));
  EXPECT_TRUE(refused(store_->multi_set(keys, keys, soon())));
  EXPECT_TRUE(refused(store_->multi_set(std::vector<std::string>{"a", "b"}, keys, soon())));
}

// The store must check the number of keys: a server would close the connection, and the client
// would take the server for dead.
TEST_P(StoreConformance, MoreKeysThanTheLimitAreRefusedByEveryVerb) {
  std::vector<std::string> keys(wire::kMaxKeysPerRequest, "k");
  EXPECT_OK(store_->multi_set(keys, keys, soon()));
  EXPECT_OK(store_->wait(keys, soon()));
  keys.emplace_back("k");
  const auto refused = [](const auto& result) {
    return !result.ok() && result.error().code() == ErrorCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused(store_->multi_set(keys, keys, soon())));
  EXPECT_TRUE(refused(store_->multi_get(keys, soon())));
  EXPECT_TRUE(refused(store_->wait(keys, soon())));
  EXPECT_TRUE(refused(store_->check(keys, soon())));
}

TEST_P(StoreConformance, ACallWithoutTimeDoesWhatNeedsNoWait) {
  const std::vector<std::string> keys = {"k"};
  const auto now = [&] { return system_->deadline_in(Duration::zero()); };
  const auto try_all = [&] {
    EXPECT_OK(store_->set("k", "v", now()));
    EXPECT_OK(store_->add("n", 1, now()));
    EXPECT_OK(store_->check(keys, now()));
    EXPECT_OK(store_->wait(keys, now()));
    EXPECT_EQ(store_->get("k", now()).value(), "v");
    EXPECT_OK(store_->queue_push("q", "item", now()));
    EXPECT_EQ(store_->queue_pop("q", now()).value(), "item");
    EXPECT_OK(store_->try_queue_pop("q", now()));
    EXPECT_OK(store_->list_keys(now()));
    EXPECT_EQ(store_->get("absent", now()).error().code(), ErrorCode::kTimeout);
    EXPECT_EQ(store_->queue_pop("q", now()).error().code(), ErrorCode::kTimeout);
  };
  for (int i = 0; i < 5; ++i) try_all();
  // The get() that waits uses the only connection of a TcpStore, so try_all() needs another one.
  run_together({[&] { EXPECT_OK(store_->get("last", soon())); },
                [&] {
                  system_->make_waiter()->park(at_once());
                  try_all();
                  EXPECT_OK(store_->set("last", "", soon()));
                }});
}

TEST_P(StoreConformance, ABarrierEndsAtTheNumberOfItsOwnCall) {
  const auto other = harness_->open();
  std::atomic<bool> has_third_come = false;
  run_together({[&] {
                  EXPECT_OK(store_->barrier("meet", 3, soon()));
                  EXPECT_TRUE(has_third_come);
                },
                [&] {
                  system_->make_waiter()->park(at_once());
                  EXPECT_OK(other->barrier("meet", 2, soon()));
                  system_->make_waiter()->park(at_once());
                  has_third_come = true;
                  EXPECT_OK(other->barrier("meet", 3, soon()));
                }});
}

TEST_P(StoreConformance, ManyRanksMeetAtOneKeyEach) {
  constexpr int kRanks = 6;
  std::vector<std::vector<std::string>> tables(kRanks);
  std::vector<std::function<void()>> bodies;
  for (int rank = 0; rank < kRanks; ++rank) {
    bodies.push_back([&, rank] {
      const auto mine = harness_->open();
      EXPECT_OK(mine->set(format("address/{}", rank), format("host:{}", rank), soon()));
      std::vector<std::string> keys;
      for (int r = 0; r < kRanks; ++r) keys.push_back(format("address/{}", r));
      tables[rank] = mine->multi_get(keys, soon()).value();
    });
  }
  run_together(std::move(bodies));
  for (const auto& table : tables) {
    EXPECT_EQ(table, (std::vector<std::string>{"host:0", "host:1", "host:2", "host:3", "host:4",
                                               "host:5"}));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Stores, StoreConformance,
    ::testing::Values(
        StoreKind{"HashStore", [](os::System& s) { return std::make_unique<HashHarness>(s); }},
        StoreKind{"FileStore", [](os::System& s) { return std::make_unique<FileHarness>(s); }},
        StoreKind{"PrefixStore", [](os::System& s) { return std::make_unique<PrefixHarness>(s); }},
        StoreKind{
            "TcpStore",
            [](os::System& s) { return std::make_unique<TcpHarness>(s, StoreProtocol::kNative); }},
        StoreKind{
            "TcpStoreC10d",
            [](os::System& s) { return std::make_unique<TcpHarness>(s, StoreProtocol::kC10d); }}),
    [](const auto& kind) { return std::string(kind.param.name); });

}  // namespace
}  // namespace cadre
