#include "cadre/launch/agent/message.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

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

// A change of one field changes the encoding, and the decoded message has the same encoding.
template <class Value>
void expect_all_encoded(const Value& base, const std::vector<std::function<void(Value&)>>& changes,
                        const std::function<Message(const Value&)>& message_with) {
  for (size_t i = 0; i < changes.size(); ++i) {
    Value value = base;
    changes[i](value);
    const std::vector<std::byte> bytes = encode(message_with(value));
    EXPECT_NE(bytes, encode(message_with(base))) << "field " << i << " is not written";
    const auto received = decode_message(bytes);
    ASSERT_TRUE(received.ok()) << "field " << i << ": " << received.error().message();
    EXPECT_EQ(encode(*received), bytes) << "field " << i << " is not read";
  }
}

TEST(AgentMessage, EveryFieldIsEncoded) {
  expect_all_encoded<Message>(
      {.kind = MessageKind::kBeat},
      {[](Message& message) { message.kind = MessageKind::kReport; },
       [](Message& message) { message.epoch = 1; }, [](Message& message) { message.round = 1; },
       [](Message& message) { message.time = TimePoint{1}; },
       [](Message& message) { message.has_workers = true; },
       [](Message& message) { message.outcome = Outcome::kStopped; },
       [](Message& message) { message.reason = "why"; },
       [](Message& message) { message.host.id = 1; },
       [](Message& message) { message.store_port = 1; },
       [](Message& message) { message.table = std::make_shared<const Table>(Table{.job = "j"}); }},
      [](const Message& message) { return message; });
}

TEST(AgentMessage, EveryFieldOfAHostIsEncoded) {
  expect_all_encoded<Host>(
      {.id = 1},
      {[](Host& host) { host.id = 2; }, [](Host& host) { host.name = "node0"; },
       [](Host& host) { host.address = "10.0.0.1:29400"; },
       [](Host& host) { host.role = "trainer"; }, [](Host& host) { host.num_slots = 2; },
       [](Host& host) { host.state = HostState::kLost; }, [](Host& host) { host.wanted_rank = 0; },
       [](Host& host) { host.node_rank = 0; }},
      [](const Host& host) { return Message{.host = host}; });
}

TEST(AgentMessage, EveryFieldOfATableIsEncoded) {
  expect_all_encoded<Table>(
      {},
      {[](Table& table) { table.job = "job"; }, [](Table& table) { table.epoch = 1; },
       [](Table& table) { table.version = 1; }, [](Table& table) { table.round = 1; },
       [](Table& table) { table.phase = Phase::kFailed; },
       [](Table& table) { table.coordinator = 1; }, [](Table& table) { table.restarts_used = 1; },
       [](Table& table) { table.reason = "why"; },
       [](Table& table) { table.hosts.push_back({.id = 1}); },
       [](Table& table) {
         table.quorums.push_back({1, 2});
       }},
      [](const Table& table) { return Message{.table = std::make_shared<const Table>(table)}; });
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
