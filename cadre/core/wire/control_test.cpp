#include "cadre/core/wire/control.h"

#include <gtest/gtest.h>

#include "cadre/core/base/random.h"
#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

Nonce nonce_of(int seed) {
  Nonce nonce;
  for (size_t i = 0; i < nonce.size(); ++i)
    nonce[i] = static_cast<std::byte>(seed + static_cast<int>(i));
  return nonce;
}

std::vector<Event> one_event_of_each() {
  const Activity activity{ActivityState::kDone, 7, {1, 2}, -1, 5, "reduce", "barrier #2"};
  return {
      LossReport{3, 1, SignOfLoss::kSilence, {{77, activity}, {78, {}}}},
      FabricLeave{4},
      GroupLeave{77, 2, 19, {3, 4}},
      GroupFailure{78, 5, {ErrorCode::kTimeout, 3, 5, "cause", "message", "remedy"}},
      StatusQuestion{6, 12, 77},
      StatusAnswer{6, 12, 2, activity},
  };
}

std::vector<ControlMessage> one_of_each() {
  return {
      Hello{LinkPurpose::kData, 3, 1, 7, "fsdp", "0.1.0", nonce_of(1)},
      Challenge{nonce_of(2)},
      Answer{nonce_of(4)},
      Refusal{"another round"},
      AbortNotice{ErrorCode::kPeerLost, 3, 0, "rank 3 is gone", "barrier #5 failed", "remedy"},
      Acceptance{nonce_of(5)},
      EventBatch{one_event_of_each()},
      EventBatch{},
      Heartbeat{},
      LeaveReceipt{},
  };
}

std::string hex_of(ConstBytes bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    const auto value = std::to_integer<unsigned>(byte);
    text += kDigits[value >> 4];
    text += kDigits[value & 15];
  }
  return text;
}

TEST(Control, EveryMessageSurvivesARoundTripInPiecesOfAnySize) {
  std::vector<std::byte> stream;
  for (const ControlMessage& message : one_of_each()) {
    const std::vector<std::byte> frame = encode_control(message);
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  for (size_t piece = 1; piece < 40; ++piece) {
    ControlSplitter splitter;
    std::vector<ControlMessage> received;
    for (size_t at = 0; at < stream.size(); at += piece) {
      splitter.append(ConstBytes(stream).subspan(at, std::min(piece, stream.size() - at)));
      while (true) {
        auto next = splitter.next();
        ASSERT_TRUE(next.ok()) << next.error().message();
        if (!next.value()) break;
        received.push_back(*next.value());
      }
    }
    EXPECT_EQ(received, one_of_each()) << "pieces of " << piece;
  }
}

// The expected bytes were written by hand from docs/formats/control-messages.md, so this test fails
// if the format changes.
TEST(Control, GoldenBytes) {
  EXPECT_EQ(hex_of(encode_control(Hello{LinkPurpose::kData, 3, 1, 7, "g", "v", {}})),
            "3d000000"
            "00"
            "06"
            "01"
            "03000000"
            "01000000"
            "0700000000000000"
            "0100000067"
            "0100000076" +
                std::string(64, '0'));
  EXPECT_EQ(hex_of(encode_control(Challenge{})), "2100000001" + std::string(64, '0'));
  EXPECT_EQ(hex_of(encode_control(Answer{})), "2100000002" + std::string(64, '0'));
  EXPECT_EQ(hex_of(encode_control(Acceptance{})), "2100000005" + std::string(64, '0'));
  EXPECT_EQ(hex_of(encode_control(AbortNotice{ErrorCode::kTimeout, -1, 2, "", "ab", "c"})),
            "19000000"
            "04"
            "01"
            "ffffffff"
            "02000000"
            "00000000"
            "02000000"
            "6162"
            "01000000"
            "63");
}

// Returns the hexadecimal digits of 32 bytes, the size of a nonce or a proof, that count up from
// `first`: "0102..." for 1.
std::string counting_hex(int first) {
  return hex_of(nonce_of(first));
}

TEST(Control, GoldenBytesOfTheHandshake) {
  EXPECT_EQ(hex_of(encode_control(Hello{LinkPurpose::kData, 3, 1, 7, "w", "1.2", nonce_of(1)})),
            "3f000000"
            "00"
            "06"  // the version of the handshake
            "01"
            "03000000"
            "01000000"
            "0700000000000000"
            "01000000"
            "77"
            "03000000"
            "312e32" +
                counting_hex(1));
  EXPECT_EQ(hex_of(encode_control(Challenge{nonce_of(1)})),
            "21000000"
            "01" +
                counting_hex(1));
  EXPECT_EQ(hex_of(encode_control(Answer{nonce_of(5)})),
            "21000000"
            "02" +
                counting_hex(5));
  EXPECT_EQ(hex_of(encode_control(Acceptance{nonce_of(9)})),
            "21000000"
            "05" +
                counting_hex(9));
  EXPECT_EQ(hex_of(encode_control(Refusal{"no"})),
            "07000000"
            "03"
            "02000000"
            "6e6f");
}

TEST(Control, GoldenBytesOfEvents) {
  EXPECT_EQ(hex_of(encode_control(Heartbeat{})), "0100000007");
  EXPECT_EQ(hex_of(encode_control(LeaveReceipt{})), "0100000008");
  EXPECT_EQ(hex_of(encode_control(EventBatch{{FabricLeave{4}, GroupLeave{0x11, 2, 19, {5, 6}}}})),
            "2d000000"
            "06"
            "0200"
            "01"
            "04000000"
            "02"
            "1100000000000000"
            "02000000"
            "1300000000000000"
            "0500000000000000"
            "0600000000000000");
  EXPECT_EQ(hex_of(encode_control(EventBatch{
                {LossReport{3,
                            1,
                            SignOfLoss::kUnreachable,
                            {{9, {ActivityState::kDone, 5, {1, 2}, -1, 256, "x", "e"}}}}}})),
            "45000000"
            "06"
            "0100"
            "00"
            "03000000"
            "01000000"
            "03"
            "01"
            "0900000000000000"
            "02"
            "0500000000000000"
            "0100000000000000"
            "0200000000000000"
            "ffffffff"
            "0001000000000000"
            "0100000078"
            "0100000065");
  EXPECT_EQ(hex_of(encode_control(
                EventBatch{{GroupFailure{9, 5, {ErrorCode::kTimeout, -1, 2, "", "ab"}}}})),
            "27000000"
            "06"
            "0100"
            "03"
            "0900000000000000"
            "05000000"
            "01"
            "ffffffff"
            "02000000"
            "00000000"
            "02000000"
            "6162"
            "00000000");
  EXPECT_EQ(
      hex_of(encode_control(EventBatch{{StatusQuestion{6, 12, 9}, StatusAnswer{6, 12, 2, {}}}})),
      "56000000"
      "06"
      "0200"
      "04"
      "06000000"
      "0c00000000000000"
      "0900000000000000"
      "05"
      "06000000"
      "0c00000000000000"
      "02000000"
      "00" +
          std::string(48, '0') + "ffffffff" + std::string(32, '0'));
}

// Decodes all events in a stream of frames.
std::vector<Event> events_in(ConstBytes stream) {
  ControlSplitter splitter;
  splitter.append(stream);
  std::vector<Event> events;
  while (true) {
    auto next = splitter.next();
    EXPECT_TRUE(next.ok());
    if (!next.ok() || !next.value()) return events;
    const auto& batch = std::get<EventBatch>(*next.value());
    events.insert(events.end(), batch.events.begin(), batch.events.end());
  }
}

TEST(Control, EventsAreCutIntoFramesThatFit) {
  const std::string text(kMaxControlTextBytes, 'x');
  std::vector<Event> events;
  for (int i = 0; i < 5; ++i) {
    events.push_back(
        GroupFailure{static_cast<uint64_t>(i), i, {ErrorCode::kTimeout, 0, 0, text, text, text}});
  }
  for (int i = 0; i < 9000; ++i) events.push_back(FabricLeave{i});
  EXPECT_EQ(events_in(encode_events(events)), events);
  EXPECT_TRUE(encode_events({}).empty());
  // The limit allows 20 frame headers of 7 bytes. 9000 events of 5 bytes and 5 events of 12 KiB fit
  // into that many frames of 16 KiB; with one frame for each event there would be 9005.
  EXPECT_LT(encode_events(events).size(), 9000 * 5 + 5 * 12400 + 20 * 7);
}

TEST(Control, WhatIsOverTheBoundsOfAnEventIsCutOrRefused) {
  LossReport loss{1, 2, SignOfLoss::kSilence, {}};
  loss.last.assign(kMaxLastActivities + 1, {5, {.phase = std::string(100, 'p')}});
  const auto decoded = events_in(encode_events(std::vector<Event>{loss}));
  ASSERT_EQ(decoded.size(), 1u);
  const auto& last = std::get<LossReport>(decoded[0]).last;
  ASSERT_EQ(last.size(), kMaxLastActivities);
  EXPECT_EQ(last[0].activity.phase, std::string(kMaxPhaseBytes, 'p'));

  std::vector<std::byte> batch = encode_control(EventBatch{{LossReport{}}});
  batch[16] = std::byte{kNumSignsOfLoss};
  EXPECT_FALSE(decode_control(ConstBytes(batch).subspan(4)).ok());
  batch[16] = std::byte{0};
  EXPECT_TRUE(decode_control(ConstBytes(batch).subspan(4)).ok());
  batch[17] = std::byte{kMaxLastActivities + 1};
  EXPECT_FALSE(decode_control(ConstBytes(batch).subspan(4)).ok());
  batch = encode_control(EventBatch{{FabricLeave{}}});
  batch[7] = static_cast<std::byte>(std::variant_size_v<Event>);
  EXPECT_FALSE(decode_control(ConstBytes(batch).subspan(4)).ok());
  batch = encode_control(EventBatch{});
  batch[6] = std::byte{0x20};
  EXPECT_FALSE(decode_control(ConstBytes(batch).subspan(4)).ok());
}

TEST(Control, GoldenBytesOfARankAddress) {
  const RankAddress rank_address{"1.2",     "n0", "b",    4711, "tcp:h:1",
                                 "unix:@c", 42,   "\x03", 9,    DeviceType::kCuda};
  EXPECT_EQ(hex_of(as_bytes(encode_rank_address(rank_address))),
            "43444332"
            "03000000"
            "312e32"
            "02000000"
            "6e30"
            "01000000"
            "62"
            "67120000"
            "07000000"
            "7463703a683a31"
            "07000000"
            "756e69783a4063"
            "2a00000000000000"
            "01000000"
            "03"
            "0900000000000000"
            "01");
}

TEST(Control, EveryTruncationAndEveryTrailingByteIsRefused) {
  for (const ControlMessage& message : one_of_each()) {
    const std::vector<std::byte> frame = encode_control(message);
    const ConstBytes body = ConstBytes(frame).subspan(4);
    for (size_t size = 0; size < body.size(); ++size) {
      EXPECT_EQ(decode_control(body.first(size)).error().code(), ErrorCode::kCorruption);
    }
    std::vector<std::byte> longer(body.begin(), body.end());
    longer.push_back(std::byte{0});
    EXPECT_FALSE(decode_control(longer).ok());
  }
}

// An early build, whose handshake had no version, sends the purpose at the offset of the version: 0
// or 3 here.
TEST(Control, AHelloOfAnotherHandshakeIsRefusedBeforeTheRestIsRead) {
  std::vector<std::byte> hello = encode_control(Hello{});
  for (const uint8_t version : {0, 3, 4, kHandshakeVersion + 1}) {
    hello[5] = std::byte{version};
    const auto refused = decode_control(ConstBytes(hello).subspan(4));
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), ErrorCode::kCorruption);
    EXPECT_NE(refused.error().message().find("another version of the handshake"), std::string::npos)
        << refused.error().message();
  }
}

TEST(Control, ValuesOutOfRangeAreRefused) {
  std::vector<std::byte> hello = encode_control(Hello{});
  hello[6] = std::byte{kNumLinkPurposes};
  EXPECT_FALSE(decode_control(ConstBytes(hello).subspan(4)).ok());
  std::vector<std::byte> answer = encode_control(EventBatch{{StatusAnswer{}}});
  answer[24] = std::byte{kNumActivityStates};
  EXPECT_FALSE(decode_control(ConstBytes(answer).subspan(4)).ok());
  answer[24] = std::byte{kNumActivityStates - 1};
  EXPECT_TRUE(decode_control(ConstBytes(answer).subspan(4)).ok());
  std::vector<std::byte> notice = encode_control(AbortNotice{});
  notice[5] = std::byte{7};
  EXPECT_FALSE(decode_control(ConstBytes(notice).subspan(4)).ok());
  const std::byte unknown_type{static_cast<uint8_t>(std::variant_size_v<ControlMessage>)};
  EXPECT_FALSE(decode_control(ConstBytes(&unknown_type, 1)).ok());
}

TEST(Control, AFrameOverTheLimitIsRefusedBeforeItIsBuffered) {
  ByteWriter prefix;
  prefix.integer(static_cast<uint32_t>(kMaxControlFrameBytes + 1));
  ControlSplitter splitter;
  splitter.append(prefix.bytes());
  EXPECT_EQ(splitter.next().error().code(), ErrorCode::kCorruption);
}

TEST(Control, LongTextsAreCutSoThatAFrameAlwaysFits) {
  const std::string text(kMaxControlTextBytes + 100, 'x');
  const auto frame = encode_control(AbortNotice{ErrorCode::kAborted, 0, 0, text, text, text});
  const auto message = decode_control(ConstBytes(frame).subspan(4));
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(std::get<AbortNotice>(*message).message.size(), kMaxControlTextBytes);
  EXPECT_EQ(std::get<AbortNotice>(*message).remedy.size(), kMaxControlTextBytes);
}

TEST(Control, RankAddressesSurviveARoundTripAndDamageIsRefused) {
  const RankAddress rank_address{"0.1.0",         "node0", "boot", 4711, "tcp:127.0.0.1:29500",
                                 "unix:@cadre-1", 42,      "\x03", 9};
  const std::string text = encode_rank_address(rank_address);
  const auto decoded = decode_rank_address(text);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(*decoded, rank_address);
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(decode_rank_address(std::string_view(text).substr(0, size)).ok());
  }
  EXPECT_FALSE(decode_rank_address(text + "x").ok());
}

TEST(Control, RandomBytesAreDecodedOrRefusedButNeverTrusted) {
  Random random(20261121);
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::byte> bytes(random.below(80));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
    const auto message = decode_control(bytes);
    if (!message.ok()) continue;
    // The decoded message must encode to exactly the same bytes.
    const std::vector<std::byte> again = encode_control(*message);
    EXPECT_EQ(hex_of(ConstBytes(again).subspan(4)), hex_of(bytes));
  }
}

}  // namespace
}  // namespace cadre::wire
