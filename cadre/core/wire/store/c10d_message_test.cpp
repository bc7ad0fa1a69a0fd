// The bytes here were recorded between torch 2.13's TCPStore client and its own server.
#include "cadre/core/wire/store/c10d_message.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

struct Recorded {
  C10dRequest request;
  std::string bytes;
};

template <size_t kSize>
std::string text(const char (&bytes)[kSize]) {
  return std::string(bytes, kSize - 1);
}

std::vector<Recorded> recorded() {
  return {
      {{.verb = C10dVerb::kValidate, .number = kC10dMagic}, text("\0\xce\xf7\x85\x3c")},
      {{.verb = C10dVerb::kPing, .number = 0x1996}, text("\x0d\x96\x19\0\0")},
      {{.verb = C10dVerb::kSet, .keys = {"/k"}, .values = {"v"}},
       text("\x01\x02\0\0\0\0\0\0\0/k\x01\0\0\0\0\0\0\0v")},
      {{.verb = C10dVerb::kCompareSet, .keys = {"/z"}, .values = {"", "1"}},
       text("\x02\x02\0\0\0\0\0\0\0/z\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0001")},
      {{.verb = C10dVerb::kGet, .keys = {"/k"}}, text("\x03\x02\0\0\0\0\0\0\0/k")},
      {{.verb = C10dVerb::kAdd, .number = 5, .keys = {"/n"}},
       text("\x04\x02\0\0\0\0\0\0\0/n\x05\0\0\0\0\0\0\0")},
      {{.verb = C10dVerb::kCheck, .keys = {"/k", "/x"}},
       text("\x05\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/k\x02\0\0\0\0\0\0\0/x")},
      {{.verb = C10dVerb::kWait, .keys = {"/x"}},
       text("\x06\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/x")},
      {{.verb = C10dVerb::kNumKeys}, text("\x07")},
      {{.verb = C10dVerb::kDeleteKey, .keys = {"/k"}}, text("\x08\x02\0\0\0\0\0\0\0/k")},
      {{.verb = C10dVerb::kAppend, .keys = {"/z"}, .values = {"2"}},
       text("\x09\x02\0\0\0\0\0\0\0/z\x01\0\0\0\0\0\0\0002")},
      {{.verb = C10dVerb::kMultiGet, .keys = {"/a", "/b"}},
       text("\x0a\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/a\x02\0\0\0\0\0\0\0/b")},
      {{.verb = C10dVerb::kMultiSet, .keys = {"/a", "/b"}, .values = {"1", "2"}},
       text("\x0b\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/a\x01\0\0\0\0\0\0\0001"
            "\x02\0\0\0\0\0\0\0/b\x01\0\0\0\0\0\0\0002")},
      {{.verb = C10dVerb::kCancelWait}, text("\x0c")},
      {{.verb = C10dVerb::kQueuePush, .keys = {"/q"}, .values = {"1"}},
       text("\x0e\x02\0\0\0\0\0\0\0/q\x01\0\0\0\0\0\0\0001")},
      {{.verb = C10dVerb::kQueuePop, .keys = {"/q"}}, text("\x0f\x02\0\0\0\0\0\0\0/q")},
      {{.verb = C10dVerb::kQueueLength, .keys = {"/q"}}, text("\x10\x02\0\0\0\0\0\0\0/q")},
      {{.verb = C10dVerb::kListKeys}, text("\x11")},
  };
}

TEST(C10dMessage, SpeaksAndReadsTheBytesThatTorchSends) {
  for (const auto& [request, bytes] : recorded()) {
    EXPECT_EQ(as_text(encode(request)), bytes) << to_string(request.verb);
    const auto decoded = decode_c10d_request(as_bytes(bytes)).value();
    ASSERT_TRUE(decoded.message.has_value()) << to_string(request.verb);
    EXPECT_EQ(*decoded.message, request) << to_string(request.verb);
    EXPECT_EQ(decoded.num_bytes, bytes.size());
  }
}

TEST(C10dMessage, ACutRequestAsksForMoreAndNeverForTooMuch) {
  for (const auto& [request, bytes] : recorded()) {
    for (size_t length = 0; length < bytes.size(); ++length) {
      const auto decoded = decode_c10d_request(as_bytes(bytes).first(length)).value();
      EXPECT_FALSE(decoded.message.has_value());
      EXPECT_GT(decoded.num_bytes, length);
      EXPECT_LE(decoded.num_bytes, bytes.size());
    }
  }
}

TEST(C10dMessage, TakesOneRequestOfSeveral) {
  const auto all = recorded();
  const std::string stream = all[2].bytes + all[5].bytes;
  const auto first = decode_c10d_request(as_bytes(stream)).value();
  EXPECT_EQ(*first.message, all[2].request);
  EXPECT_EQ(first.num_bytes, all[2].bytes.size());
}

TEST(C10dMessage, RefusesUnknownVerbsAndLengthsOverTheLimits) {
  const std::vector<std::string> wrong = {
      text("\x13"),
      text("\xff"),
      text("\x03\x01\x20\0\0\0\0\0\0"),                  // a key of 8193 bytes
      text("\x03\xff\xff\xff\xff\xff\xff\xff\xff"),      // a key without end
      text("\x01\0\0\0\0\0\0\0\0\x01\0\0\x01\0\0\0\0"),  // a value of 16 MiB + 1
      text("\x06\x01\0\x01\0\0\0\0\0"),                  // 65537 keys
  };
  for (const std::string& bytes : wrong) {
    const auto refused = decode_c10d_request(as_bytes(bytes));
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code(), ErrorCode::kCorruption);
  }
}

TEST(C10dMessage, ARequestMayNotGrowOverItsLimitInSmallSteps) {
  // multi_set of values that are each within their limit.
  ByteWriter writer;
  writer.integer(C10dVerb::kMultiSet);
  writer.integer(uint64_t{100});
  const std::string value(kMaxC10dValueBytes, 'x');
  for (int i = 0; i < 4; ++i) {
    writer.text<uint64_t>("k");
    writer.text<uint64_t>(value);
  }
  EXPECT_FALSE(decode_c10d_request(writer.bytes()).ok());
}

TEST(C10dMessage, AnswersAreTheBytesThatTorchsServerSends) {
  EXPECT_EQ(as_text(encode_c10d_byte(kC10dNotReady)), text("\x01"));
  EXPECT_EQ(as_text(encode_c10d_nonce(0x1996)), text("\x96\x19\0\0"));
  EXPECT_EQ(as_text(encode_c10d_number(-2)), text("\xfe\xff\xff\xff\xff\xff\xff\xff"));
  EXPECT_EQ(as_text(encode_c10d_value("v")), text("\x01\0\0\0\0\0\0\0v"));
}

TEST(C10dMessage, AnswersComeBackAsTheyWereWritten) {
  EXPECT_EQ(*decode_c10d_byte(encode_c10d_byte(1)).value().message, 1);
  EXPECT_EQ(*decode_c10d_nonce(encode_c10d_nonce(0xdeadbeef)).value().message, 0xdeadbeef);
  EXPECT_EQ(*decode_c10d_number(encode_c10d_number(-2)).value().message, -2);
  std::vector<std::byte> values = encode_c10d_value("one");
  const std::vector<std::byte> second = encode_c10d_value("");
  values.insert(values.end(), second.begin(), second.end());
  const auto decoded = decode_c10d_values(values, 2).value();
  EXPECT_EQ(*decoded.message, (std::vector<std::string>{"one", ""}));
  EXPECT_EQ(decoded.num_bytes, values.size());
  EXPECT_FALSE(decode_c10d_values(values, 3).value().message.has_value());
  EXPECT_FALSE(decode_c10d_byte({}).value().message.has_value());
}

}  // namespace
}  // namespace cadre::wire
