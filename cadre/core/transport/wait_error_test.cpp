#include "cadre/core/transport/wait_error.h"

#include <gtest/gtest.h>

#include <array>

namespace cadre {
namespace {

TEST(WaitError, NamesTheAwaitedPeersAndWhatIsWantedOfThem) {
  const std::array interests{ChannelInterest{.peer = 1, .want_send = true},
                             ChannelInterest{.peer = 2, .want_send = true, .want_recv = true}};
  const Error timeout = timeout_error(0, interests);
  EXPECT_EQ(timeout.code(), ErrorCode::kTimeout);
  EXPECT_EQ(timeout.message(),
            "rank 0: the deadline passed while waiting to send to rank 1, to send to rank 2, to "
            "receive from rank 2; see whether the peer hangs, or allow more time");
  const Error interrupted = interrupted_error(3, std::span(interests).first(1));
  EXPECT_EQ(interrupted.code(), ErrorCode::kAborted);
  EXPECT_EQ(interrupted.message(),
            "rank 3: the group was interrupted while waiting to send to rank 1; look at the "
            "group's first failure");
}

TEST(WaitError, SaysThatNothingWasAwaited) {
  const std::array idle{ChannelInterest{.peer = 1}};
  EXPECT_NE(timeout_error(0, idle).message().find("while waiting for nothing;"), std::string::npos);
}

}  // namespace
}  // namespace cadre
