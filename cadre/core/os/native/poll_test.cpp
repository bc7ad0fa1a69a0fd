#include "cadre/core/os/native/poll.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <vector>

#include "cadre/core/os/io/fd.h"
#include "cadre/core/os/native/monotonic_clock.h"

namespace cadre::os {
namespace {

class PipeEnd final : public Pollable {
 public:
  explicit PipeEnd(int number) : fd_(number) {}
  int poll_handle() const override { return fd_.get(); }
  void close() { fd_.close(); }

 private:
  Fd fd_;
};

class PollTest : public ::testing::Test {
 protected:
  static Deadline in(Duration budget) { return Deadline(monotonic_now() + budget); }
  static std::array<int, 2> make_ends() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe(ends.data()), 0);
    return ends;
  }

  const std::array<int, 2> ends_ = make_ends();
  PipeEnd reader_{ends_[0]};
  PipeEnd writer_{ends_[1]};
};

TEST_F(PollTest, SaysWhatIsReadyOfWhatIsWanted) {
  std::array items{PollItem{.target = &reader_, .want_read = true},
                   PollItem{.target = &writer_, .want_write = true}, PollItem{.target = &writer_}};
  EXPECT_TRUE(poll_items(items, in(std::chrono::seconds(20))));
  EXPECT_FALSE(items[0].can_read);
  EXPECT_TRUE(items[1].can_write);
  EXPECT_FALSE(items[1].can_read);
  EXPECT_FALSE(items[2].can_write);
  ASSERT_EQ(::write(writer_.poll_handle(), "x", 1), 1);
  EXPECT_TRUE(poll_items(items, in(std::chrono::seconds(20))));
  EXPECT_TRUE(items[0].can_read);
  EXPECT_FALSE(items[0].can_write);
}

TEST_F(PollTest, AnEndedStreamIsReadyForBoth) {
  writer_.close();
  std::array items{PollItem{.target = &reader_, .want_read = true}};
  EXPECT_TRUE(poll_items(items, in(std::chrono::seconds(20))));
  EXPECT_TRUE(items[0].can_read);
  EXPECT_TRUE(items[0].can_write);
}

TEST_F(PollTest, NothingReadyIsFalseAtTheDeadlineAndAtOnceForAPastOne) {
  std::array items{PollItem{.target = &reader_, .want_read = true}};
  const TimePoint begin = monotonic_now();
  EXPECT_FALSE(poll_items(items, Deadline(TimePoint{})));
  EXPECT_FALSE(poll_items(items, in(std::chrono::milliseconds(3))));
  EXPECT_GE(monotonic_now() - begin, std::chrono::milliseconds(3));
  EXPECT_FALSE(poll_one(reader_.poll_handle(), POLLIN, in(std::chrono::milliseconds(1))));
  EXPECT_TRUE(poll_one(writer_.poll_handle(), POLLOUT, in(std::chrono::seconds(20))));
}

TEST_F(PollTest, MoreItemsThanFitOnTheStackArePolledToo) {
  std::vector<PollItem> items(70, PollItem{.target = &reader_, .want_read = true});
  items.back() = {.target = &writer_, .want_write = true};
  EXPECT_TRUE(poll_items(items, in(std::chrono::seconds(20))));
  EXPECT_TRUE(items.back().can_write);
  EXPECT_FALSE(items.front().can_read);
}

}  // namespace
}  // namespace cadre::os
