#include "cadre/wire/control.h"

#include <gtest/gtest.h>

#include "cadre/base/random.h"
#include "cadre/wire/byte_codec.h"

namespace cadre::wire {
namespace {

Nonce nonce_of(int seed) {
  Nonce nonce;
  for (size_t i = 0; i < nonce.size(); ++i)
    nonce[i] = static_cast<std::byte>(seed + static_cast<int>(i));
  return nonce;
}

std::vector<ControlMessage> one_of_each() {
  return {
      Hello{LinkPurpose::kSide, 3, 1, 7, "fsdp", "0.1.0", nonce_of(1)},
      Challenge{nonce_of(2)},
      Answer{nonce_of(4)},
      Refusal{"another round"},
      StatusReport{9,
                   {ActivityState::kRunning, 1042, {0xfeed, 0xbee}, 3, 61'000'000'000, "reduce"}},
      StatusRequest{9},
      AbortNotice{ErrorCode::kPeerLost, 3, 0, "rank 3 is gone", "barrier #5 failed"},
      Goodbye{17},
      GoodbyeReceipt{},
      Acceptance{nonce_of(5)},
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

// Written out by hand from docs/formats/control-messages.md: a change of the format must be seen.
TEST(Control, GoldenBytes) {
  EXPECT_EQ(hex_of(encode_control(Hello{LinkPurpose::kSide, 3, 1, 7, "g", "v", {}})),
            "3d000000"
            "00"
            "04"
            "03"
            "03000000"
            "01000000"
            "0700000000000000"
            "0100000067"
            "0100000076" +
                std::string(64, '0'));
  EXPECT_EQ(hex_of(encode_control(Challenge{})), "2100000001" + std::string(64, '0'));
  EXPECT_EQ(hex_of(encode_control(Answer{})), "2100000002" + std::string(64, '0'));
  EXPECT_EQ(hex_of(encode_control(Acceptance{})), "2100000009" + std::string(64, '0'));
  EXPECT_EQ(hex_of(encode_control(Goodbye{17})),
            "09000000"
            "07"
            "1100000000000000");
  EXPECT_EQ(hex_of(encode_control(AbortNotice{ErrorCode::kTimeout, -1, 2, "", "ab"})),
            "14000000"
            "06"
            "01"
            "ffffffff"
            "02000000"
            "00000000"
            "02000000"
            "6162");
  EXPECT_EQ(hex_of(encode_control(
                StatusReport{2, {ActivityState::kDone, 5, {0x0102, 0x0304}, -1, 256, "x"}})),
            "33000000"
            "04"
            "0200000000000000"
            "02"
            "0500000000000000"
            "0201000000000000"
            "0403000000000000"
            "ffffffff"
            "0001000000000000"
            "01000000"
            "78");
}

// "01020304...": as many bytes as a nonce or a proof has, counted from `first`.
std::string counting_hex(int first) {
  return hex_of(nonce_of(first));
}

TEST(Control, GoldenBytesOfTheHandshake) {
  EXPECT_EQ(
      hex_of(encode_control(Hello{LinkPurpose::kPointToPoint, 3, 1, 7, "w", "1.2", nonce_of(1)})),
      "3f000000"
      "00"
      "04"  // version of the handshake
      "02"
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
            "09" +
                counting_hex(9));
  EXPECT_EQ(hex_of(encode_control(Refusal{"no"})),
            "07000000"
            "03"
            "02000000"
            "6e6f");
}

TEST(Control, GoldenBytesOfShortMessages) {
  EXPECT_EQ(hex_of(encode_control(StatusRequest{9})),
            "09000000"
            "05"
            "0900000000000000");
  EXPECT_EQ(hex_of(encode_control(GoodbyeReceipt{})),
            "01000000"
            "08");
}

TEST(Control, GoldenBytesOfACard) {
  const RankCard card{"1.2", "n0", "b", 4711, "tcp:h:1", "unix:@c", 42, "\x03"};
  EXPECT_EQ(hex_of(as_bytes(encode_card(card))),
            "43444331"
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
            "03");
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

// In a hello of a build from before the handshake had a version, the purpose stands there.
TEST(Control, AHelloOfAnotherHandshakeIsRefusedBeforeTheRestIsRead) {
  std::vector<std::byte> hello = encode_control(Hello{});
  for (const uint8_t version : {0, 3, kHandshakeVersion + 1}) {
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
  std::vector<std::byte> report = encode_control(StatusReport{});
  report[13] = std::byte{kNumActivityStates};
  EXPECT_FALSE(decode_control(ConstBytes(report).subspan(4)).ok());
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
  const auto frame = encode_control(AbortNotice{ErrorCode::kAborted, 0, 0, text, text});
  const auto message = decode_control(ConstBytes(frame).subspan(4));
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(std::get<AbortNotice>(*message).message.size(), kMaxControlTextBytes);
}

TEST(Control, CardsSurviveARoundTripAndDamageIsRefused) {
  const RankCard card{"0.1.0",         "node0", "boot", 4711, "tcp:127.0.0.1:29500",
                      "unix:@cadre-1", 42,      "\x03"};
  const std::string text = encode_card(card);
  const auto decoded = decode_card(text);
  ASSERT_TRUE(decoded.ok());
  EXPECT_EQ(*decoded, card);
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_FALSE(decode_card(std::string_view(text).substr(0, size)).ok());
  }
  EXPECT_FALSE(decode_card(text + "x").ok());
}

TEST(Control, RandomBytesAreDecodedOrRefusedButNeverTrusted) {
  Random random(20261121);
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::byte> bytes(random.below(80));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
    const auto message = decode_control(bytes);
    if (!message.ok()) continue;
    // What was decoded must be exactly what those bytes say.
    const std::vector<std::byte> again = encode_control(*message);
    EXPECT_EQ(hex_of(ConstBytes(again).subspan(4)), hex_of(bytes));
  }
}

}  // namespace
}  // namespace cadre::wire
