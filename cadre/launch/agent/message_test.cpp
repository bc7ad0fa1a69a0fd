#include "cadre/launch/agent/message.h"

#include <gtest/gtest.h>

#include <memory>

namespace cadre::launch {
namespace {

Message full_message() {
  Table table{.job = "job", .epoch = 3, .version = 9, .round = 2, .phase = Phase::kRunning};
  table.hosts = {{.id = 7,
                  .name = "node0",
                  .address = "10.0.0.1:29400",
                  .role = "trainer",
                  .num_slots = 4,
                  .state = HostState::kIn,
                  .node_rank = 0}};
  table.quorums = {{7}};
  return {.kind = MessageKind::kJoin,
          .epoch = 3,
          .round = 2,
          .time = TimePoint{-5},
          .has_workers = true,
          .outcome = Outcome::kFailed,
          .reason = "rank 3 exited with code 1",
          .host = table.hosts[0],
          .store_port = 40123,
          .table = std::make_shared<const Table>(table)};
}

TEST(AgentMessage, ArrivesAsItWasSent) {
  const Message sent = full_message();
  const auto received = decode_message(encode(sent));
  ASSERT_TRUE(received.ok()) << received.error().message();
  EXPECT_EQ(received->kind, sent.kind);
  EXPECT_EQ(received->epoch, sent.epoch);
  EXPECT_EQ(received->round, sent.round);
  EXPECT_EQ(received->time, sent.time);
  EXPECT_EQ(received->has_workers, sent.has_workers);
  EXPECT_EQ(received->outcome, sent.outcome);
  EXPECT_EQ(received->reason, sent.reason);
  EXPECT_EQ(received->host, sent.host);
  EXPECT_EQ(received->store_port, sent.store_port);
  ASSERT_NE(received->table, nullptr);
  EXPECT_EQ(*received->table, *sent.table);
}

TEST(AgentMessage, EveryShorterPartIsRefused) {
  const std::vector<std::byte> bytes = encode(full_message());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(decode_message(ConstBytes(bytes).first(size)).ok()) << size << " bytes";
  }
}

TEST(AgentMessage, ABeatWithBytesLeftIsRefused) {
  std::vector<std::byte> bytes = encode({.kind = MessageKind::kBeat});
  ASSERT_TRUE(decode_message(bytes).ok());
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(decode_message(bytes).ok());
}

TEST(AgentMessage, ATableOrAJoinWithoutItsPartsIsRefused) {
  for (const MessageKind kind : {MessageKind::kTable, MessageKind::kJoin}) {
    Message message = full_message();
    message.kind = kind;
    message.table = nullptr;
    EXPECT_FALSE(decode_message(encode(message)).ok());
    message = full_message();
    message.kind = kind;
    message.host.id = 0;
    EXPECT_FALSE(decode_message(encode(message)).ok());
  }
}

TEST(AgentMessage, ALongReasonIsCut) {
  const auto received =
      decode_message(encode({.kind = MessageKind::kReport, .reason = std::string(70000, 'x')}));
  ASSERT_TRUE(received.ok());
  EXPECT_EQ(received->reason, std::string(Table::kMaxTextBytes, 'x'));
}

}  // namespace
}  // namespace cadre::launch
