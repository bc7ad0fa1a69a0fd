// Tests the order in which a control connection sends the events and receipts that were posted to
// it.
#include "cadre/core/fabric/plane/control_link.h"

#include <gtest/gtest.h>

#include <utility>
#include <variant>

#include "cadre/testing/core/silent_socket.h"

namespace cadre {
namespace {

// A socket that accepts all bytes and keeps them.
class RecordingSocket final : public testing::SilentSocket {
 public:
  explicit RecordingSocket(wire::ControlSplitter& sent) : sent_(sent) {}

  Result<size_t> try_send(ConstBytes data) override {
    sent_.append(data);
    return data.size();
  }

 private:
  wire::ControlSplitter& sent_;
};

// A leaving rank that has received all receipts closes its connections. So an event that is sent to
// it after the receipt would be lost.
TEST(ControlLink, AReceiptIsSentAfterAllEventsOfTheSameFlush) {
  wire::ControlSplitter sent;
  ControlMeter meter;
  ControlLink link({.id = 1, .peer = 4, .socket = std::make_unique<RecordingSocket>(sent)}, meter);
  link.post_receipt();
  EXPECT_FALSE(link.is_flushed());
  const wire::Event event = wire::FabricLeave{3};
  link.post(event);
  link.flush();
  EXPECT_TRUE(link.is_flushed());
  const auto first = sent.next().value_or_throw();
  ASSERT_TRUE(first.has_value());
  ASSERT_TRUE(std::holds_alternative<wire::EventBatch>(*first));
  EXPECT_EQ(std::get<wire::EventBatch>(*first).events, std::vector{event});
  const auto second = sent.next().value_or_throw();
  ASSERT_TRUE(second.has_value());
  EXPECT_TRUE(std::holds_alternative<wire::LeaveReceipt>(*second));
  link.flush();
  EXPECT_FALSE(sent.next().value_or_throw().has_value()) << "no second receipt is sent";
}

}  // namespace
}  // namespace cadre
