// The order in which a control connection sends what was posted to it.
#include "cadre/comm/fabric/control_link.h"

#include <gtest/gtest.h>

#include <utility>
#include <variant>

namespace cadre {
namespace {

// Takes all bytes and keeps them.
class RecordingSocket final : public os::Socket {
 public:
  explicit RecordingSocket(wire::ControlSplitter& sent) : sent_(sent) {}

  Result<size_t> try_send(ConstBytes data) override {
    sent_.append(data);
    return data.size();
  }
  Result<size_t> try_recv(Bytes) override { return size_t{0}; }
  Result<bool> try_send_segment(const os::SharedMemory&) override { return false; }
  Result<std::unique_ptr<os::SharedMemory>> try_recv_segment() override {
    return std::unique_ptr<os::SharedMemory>();
  }
  void shutdown() override {}
  os::Address local_address() const override { return {}; }
  os::Address peer_address() const override { return {}; }
  Status check_peer_user() const override { return {}; }

 private:
  wire::ControlSplitter& sent_;
};

// A rank that has all receipts closes its connections, so an event behind a receipt would be lost.
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
  EXPECT_FALSE(sent.next().value_or_throw().has_value()) << "a second receipt";
}

}  // namespace
}  // namespace cadre
