// Tests a key table in cases that a test of a whole store cannot produce reliably: a client is
// cancelled before it takes an item that was assigned to it, or keys are erased during a wait.
#include "cadre/core/store/key_table.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace cadre::store {
namespace {

using Tickets = std::vector<KeyTable::Ticket>;

TEST(KeyTable, AnItemThatIsGivenBackIsTheFirstOfItsQueueAgain) {
  KeyTable table;
  ASSERT_EQ(table.pop_or_wait(1, "q"), std::nullopt);
  ASSERT_TRUE(table.push("q", "older").ok());
  ASSERT_TRUE(table.push("q", "newer").ok());
  table.cancel(1);
  EXPECT_EQ(table.take_ready(), Tickets());
  EXPECT_EQ(table.pop("q"), "older");
  EXPECT_EQ(table.pop("q"), "newer");
}

TEST(KeyTable, AnItemThatIsGivenBackGoesToTheNextThatWaits) {
  KeyTable table;
  ASSERT_EQ(table.pop_or_wait(1, "q"), std::nullopt);
  ASSERT_EQ(table.pop_or_wait(2, "q"), std::nullopt);
  ASSERT_TRUE(table.push("q", "item").ok());
  ASSERT_EQ(table.take_ready(), Tickets{1});
  table.cancel(1);
  EXPECT_EQ(table.take_ready(), Tickets{2});
  EXPECT_EQ(table.take_item(2), "item");
}

TEST(KeyTable, AKeyThatIsErasedDuringAWaitIsWaitedForAgain) {
  KeyTable table;
  ASSERT_FALSE(table.wait(1, {"a", "b"}));
  ASSERT_TRUE(table.set("a", "").ok());  // the wait still waits for b
  ASSERT_TRUE(table.erase("a"));
  ASSERT_TRUE(table.set("b", "").ok());
  EXPECT_EQ(table.take_ready(), Tickets());
  ASSERT_TRUE(table.set("a", "").ok());
  EXPECT_EQ(table.take_ready(), Tickets{1});
}

// The item of a cancelled ticket (pending pop) must be put back even if the table is full. The
// table must then accept no other value.
TEST(KeyTable, AnItemThatIsGivenBackDoesNotLiftTheLimit) {
  KeyTable table(/*max_bytes=*/400);
  ASSERT_EQ(table.pop_or_wait(1, "q"), std::nullopt);
  ASSERT_TRUE(table.push("q", std::string(200, 'i')).ok());
  ASSERT_TRUE(table.set("k", std::string(300, 'v')).ok());
  table.cancel(1);
  EXPECT_FALSE(table.set("other", std::string(10, 'v')).ok());
  EXPECT_FALSE(table.push("q", std::string(10, 'v')).ok());
}

TEST(KeyTable, AClientThatWaitsForMoreThanAQueueDoesNotKeepItsItemFromTheNext) {
  KeyTable table;
  ASSERT_FALSE(table.wait(1, {"q", "other"}, KeyTable::Wake::kOnePerPush));
  ASSERT_FALSE(table.wait(2, {"q"}, KeyTable::Wake::kOnePerPush));
  ASSERT_TRUE(table.push("q", "item").ok());
  EXPECT_EQ(table.take_ready(), Tickets{2});
  EXPECT_EQ(table.pop("q"), "item");
  // Ticket 1 is still waiting: it needs "other" and a new item in the queue.
  ASSERT_TRUE(table.set("other", "").ok());
  EXPECT_EQ(table.take_ready(), Tickets());
  ASSERT_TRUE(table.push("q", "item").ok());
  EXPECT_EQ(table.take_ready(), Tickets{1});
}

TEST(KeyTable, ABarrierEndsAtTheNumberOfItsOwnCall) {
  KeyTable table;
  EXPECT_FALSE(table.arrive(1, "meet", 3).value_or_throw());
  EXPECT_TRUE(table.arrive(2, "meet", 2).value_or_throw());
  EXPECT_EQ(table.take_ready(), Tickets());
  EXPECT_TRUE(table.is_waiting(1));
  EXPECT_FALSE(table.arrive(3, "meet", 5).value_or_throw());
  EXPECT_EQ(table.take_ready(), Tickets{1});
}

}  // namespace
}  // namespace cadre::store
