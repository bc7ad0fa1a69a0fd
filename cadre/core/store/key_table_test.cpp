// Tests a key table if a rank leaves before it takes an item that was assigned to it, or if keys
// are erased during a wait. A test of a whole store cannot produce these cases reliably.
#include "cadre/core/store/key_table.h"

#include <gtest/gtest.h>

#include <optional>
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

}  // namespace
}  // namespace cadre::store
