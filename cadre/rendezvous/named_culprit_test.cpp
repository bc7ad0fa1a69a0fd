// The rank at fault as a failed rank leaves it for the launcher.
#include "cadre/rendezvous/named_culprit.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>

#include "cadre/os/system.h"
#include "cadre/store/hash_store.h"

namespace cadre {
namespace {

class NamedCulpritTest : public ::testing::Test {
 protected:
  Deadline soon() { return system_->deadline_in(std::chrono::seconds(10)); }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  HashStore store_{*system_};
};

TEST_F(NamedCulpritTest, IsThereUntilItIsErased) {
  EXPECT_EQ(read_culprit(store_, 1, soon()).value(), std::nullopt);
  ASSERT_TRUE(name_culprit(store_, {.writer = 1, .culprit = 12}, soon()).ok());
  EXPECT_EQ(read_culprit(store_, 1, soon()).value(), Rank(12));
  EXPECT_EQ(read_culprit(store_, 12, soon()).value(), std::nullopt);
  ASSERT_TRUE(forget_culprit(store_, 1, soon()).ok());
  EXPECT_EQ(read_culprit(store_, 1, soon()).value(), std::nullopt);
}

TEST_F(NamedCulpritTest, WhatIsNoRankIsRefused) {
  for (const char* text : {"", "-1", "2x", "99999999999"}) {
    ASSERT_TRUE(store_.set("cadre/failure/0", text, soon()).ok());
    const auto note = read_culprit(store_, 0, soon());
    ASSERT_FALSE(note.ok()) << text;
    EXPECT_EQ(note.error().code(), ErrorCode::kCorruption);
  }
}

}  // namespace
}  // namespace cadre
