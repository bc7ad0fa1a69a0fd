#include "cadre/core/collective/net/link.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

namespace cadre {
namespace {

TEST(CallHistory, FindsTheLastOperationsBeforeTheGivenOne) {
  CallHistory history;
  for (uint64_t number = 1; number <= 20; ++number) {
    history.add({.number = number, .fingerprint = {.call = 100 + number}});
  }
  const OperationHeader current{.number = 20};
  EXPECT_EQ(history.find(4, current), std::nullopt);
  for (uint64_t number = 5; number < 20; ++number) {
    const auto found = history.find(number, current);
    ASSERT_TRUE(found.has_value()) << number;
    EXPECT_EQ(found->call, 100 + number);
  }
  EXPECT_EQ(history.find(20, current), std::nullopt);
}

// A channel that accepts no bytes until `has_ended` is set, and then returns kPeerLost.
class EndingChannel final : public Channel {
 public:
  Result<size_t> try_send(ConstBytes) override {
    if (has_ended) return Error(ErrorCode::kPeerLost, "the channel has ended");
    return size_t{0};
  }
  Result<size_t> try_recv(Bytes buffer) override { return try_send(buffer); }

  bool has_ended = false;
};

// An ended channel always counts as ready for sending. If the link kept the unsent announcement,
// each wait that watches this peer would return at once, and connections to other peers would
// hardly make progress.
TEST(Link, AnAnnouncementThatAnEndedChannelDoesNotTakeIsDropped) {
  const OperationHeader barrier{.number = 1};
  const CallHistory history;
  EndingChannel channel;
  Link link(channel, history);
  link.begin_operation();
  link.announce(barrier);
  EXPECT_FALSE(link.is_send_done());
  channel.has_ended = true;
  link.advance_announcement();
  EXPECT_TRUE(link.is_send_done());
  link.begin_operation();
  link.announce(barrier);
  EXPECT_TRUE(link.is_send_done());
}

}  // namespace
}  // namespace cadre
