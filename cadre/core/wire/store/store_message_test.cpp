// Tests the messages of the store. The expected bytes of c10d's verbs were recorded between the
// TCPStore client and server of torch 2.13.
#include "cadre/core/wire/store/store_message.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {
namespace {

// Decodes a complete message with a single call of the decoder.
Result<Decoded<StoreRequest>> read_request(ConstBytes stream) {
  Progress progress;
  return decode_store_request(stream, progress);
}

Result<Decoded<StoreResponse>> read_answer(const StoreRequest& request, ConstBytes stream) {
  Progress progress;
  return decode_answer(request, stream, progress);
}

Result<Decoded<StoreResponse>> read_c10d_answer(const StoreRequest& request, ConstBytes stream) {
  Progress progress;
  return decode_c10d_answer(request, stream, progress);
}

struct Written {
  StoreRequest request;
  std::string bytes;
};

template <size_t kSize>
std::string text(const char (&bytes)[kSize]) {
  return std::string(bytes, kSize - 1);
}

std::vector<Written> recorded() {
  return {
      {{.verb = StoreVerb::kValidate, .amount = kC10dMagic}, text("\0\xce\xf7\x85\x3c")},
      {{.verb = StoreVerb::kPing, .amount = 0x1996}, text("\x0d\x96\x19\0\0")},
      {{.verb = StoreVerb::kSet, .keys = {"/k"}, .values = {"v"}},
       text("\x01\x02\0\0\0\0\0\0\0/k\x01\0\0\0\0\0\0\0v")},
      {{.verb = StoreVerb::kCompareSet, .keys = {"/z"}, .values = {"", "1"}},
       text("\x02\x02\0\0\0\0\0\0\0/z\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0001")},
      {{.verb = StoreVerb::kGet, .keys = {"/k"}}, text("\x03\x02\0\0\0\0\0\0\0/k")},
      {{.verb = StoreVerb::kAdd, .amount = 5, .keys = {"/n"}},
       text("\x04\x02\0\0\0\0\0\0\0/n\x05\0\0\0\0\0\0\0")},
      {{.verb = StoreVerb::kCheck, .keys = {"/k", "/x"}},
       text("\x05\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/k\x02\0\0\0\0\0\0\0/x")},
      {{.verb = StoreVerb::kWait, .keys = {"/x"}},
       text("\x06\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/x")},
      {{.verb = StoreVerb::kNumKeys}, text("\x07")},
      {{.verb = StoreVerb::kErase, .keys = {"/k"}}, text("\x08\x02\0\0\0\0\0\0\0/k")},
      {{.verb = StoreVerb::kAppend, .keys = {"/z"}, .values = {"2"}},
       text("\x09\x02\0\0\0\0\0\0\0/z\x01\0\0\0\0\0\0\0002")},
      {{.verb = StoreVerb::kMultiGet, .keys = {"/a", "/b"}},
       text("\x0a\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/a\x02\0\0\0\0\0\0\0/b")},
      {{.verb = StoreVerb::kMultiSet, .keys = {"/a", "/b"}, .values = {"1", "2"}},
       text("\x0b\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/a\x01\0\0\0\0\0\0\0001"
            "\x02\0\0\0\0\0\0\0/b\x01\0\0\0\0\0\0\0002")},
      {{.verb = StoreVerb::kCancel}, text("\x0c")},
      {{.verb = StoreVerb::kQueuePush, .keys = {"/q"}, .values = {"1"}},
       text("\x0e\x02\0\0\0\0\0\0\0/q\x01\0\0\0\0\0\0\0001")},
      {{.verb = StoreVerb::kTryQueuePop, .keys = {"/q"}}, text("\x0f\x02\0\0\0\0\0\0\0/q")},
      {{.verb = StoreVerb::kQueueLength, .keys = {"/q"}}, text("\x10\x02\0\0\0\0\0\0\0/q")},
      {{.verb = StoreVerb::kListKeys}, text("\x11")},
  };
}

// Returns requests with Cadre's own verbs, and their bytes from docs/formats/store-tcp.md.
std::vector<Written> own() {
  const std::string nonce(kNonceBytes, 'n');
  const std::string proof(sizeof(Digest), 'p');
  return {
      {{.verb = StoreVerb::kHello, .amount = kStoreProtocol, .keys = {"0.1.0"}, .values = {nonce}},
       text("\xc0\x04\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0"
            "0.1.0\x20\0\0\0\0\0\0\0") +
           nonce},
      {{.verb = StoreVerb::kProve, .values = {proof}}, text("\xc1\x20\0\0\0\0\0\0\0") + proof},
      {{.verb = StoreVerb::kQueuePop, .keys = {"q"}}, text("\xc2\x01\0\0\0\0\0\0\0q")},
      {{.verb = StoreVerb::kLeaveWill, .keys = {"k"}, .values = {"gone"}},
       text("\xc3\x01\0\0\0\0\0\0\0k\x04\0\0\0\0\0\0\0gone")},
      {{.verb = StoreVerb::kRetractWill}, text("\xc4")},
  };
}

std::vector<Written> all_requests() {
  std::vector<Written> all = recorded();
  for (const Written& written : own()) all.push_back(written);
  all.push_back({{.verb = StoreVerb::kBarrier, .amount = 8, .keys = {"b"}},
                 text("\x12\x01\0\0\0\0\0\0\0b\x08\0\0\0\0\0\0\0")});
  return all;
}

// A request, its response, and the bytes with which a c10d client gets the response.
struct Answered {
  StoreRequest request;
  StoreResponse response;
  std::string bytes;
};

std::vector<Answered> answers() {
  const std::string three = text("\x03\0\0\0\0\0\0\0");
  const std::string value = text("\x01\0\0\0\0\0\0\0v");
  const std::vector<std::string> two = {"a", "b"};
  return {
      {{.verb = StoreVerb::kSet}, {}, ""},
      {{.verb = StoreVerb::kGet}, {.values = {"v"}}, value},
      {{.verb = StoreVerb::kAdd}, {.number = -2}, text("\xfe\xff\xff\xff\xff\xff\xff\xff")},
      {{.verb = StoreVerb::kCheck}, {.number = 1}, text("\0")},
      {{.verb = StoreVerb::kCheck}, {.number = 0}, text("\x01")},
      {{.verb = StoreVerb::kWait}, {.number = kC10dStopWaiting}, text("\0")},
      {{.verb = StoreVerb::kCancel}, {.number = kC10dWaitCanceled}, text("\x01")},
      {{.verb = StoreVerb::kPing}, {.number = 0xdeadbeef}, text("\xef\xbe\xad\xde")},
      {{.verb = StoreVerb::kMultiGet, .keys = two},
       {.values = {"v", ""}},
       value + std::string(8, '\0')},
      {{.verb = StoreVerb::kListKeys}, {.values = {"v"}}, text("\x01\0\0\0\0\0\0\0") + value},
      {{.verb = StoreVerb::kTryQueuePop}, {.number = 3, .values = {"v"}}, three + value},
      {{.verb = StoreVerb::kTryQueuePop}, {}, std::string(8, '\0')},
      {{.verb = StoreVerb::kQueueLength}, {.number = 3}, three},
      {{.verb = StoreVerb::kHello},
       {.number = 3, .values = {"v", ""}},
       three + value + std::string(8, '\0')},
  };
}

TEST(StoreMessage, RequestsAreTheBytesThatTorchSendsAndThoseOfTheFormatPage) {
  for (const auto& [request, bytes] : all_requests()) {
    ASSERT_TRUE(check_shape(request).ok()) << to_string(request.verb);
    EXPECT_EQ(as_text(encode(request)), bytes) << to_string(request.verb);
    const auto decoded = read_request(as_bytes(bytes)).value();
    ASSERT_TRUE(decoded.message.has_value()) << to_string(request.verb);
    EXPECT_EQ(*decoded.message, request) << to_string(request.verb);
    EXPECT_EQ(decoded.num_bytes, bytes.size());
  }
  EXPECT_EQ(all_requests().size(), static_cast<size_t>(kNumC10dVerbs + kNumOwnVerbs));
}

TEST(StoreMessage, ACutRequestAsksForMoreAndNeverForTooMuch) {
  for (const auto& [request, bytes] : all_requests()) {
    for (size_t length = 0; length < bytes.size(); ++length) {
      const auto decoded = read_request(as_bytes(bytes).first(length)).value();
      EXPECT_FALSE(decoded.message.has_value());
      EXPECT_GT(decoded.num_bytes, length);
      EXPECT_LE(decoded.num_bytes, bytes.size());
    }
  }
}

TEST(StoreMessage, TakesOneRequestOfSeveral) {
  const auto all = recorded();
  const std::string stream = all[2].bytes + all[5].bytes;
  const auto first = read_request(as_bytes(stream)).value();
  EXPECT_EQ(*first.message, all[2].request);
  EXPECT_EQ(first.num_bytes, all[2].bytes.size());
}

TEST(StoreMessage, LongMessagesThatComeInPiecesAreThoseThatComeAtOnce) {
  StoreRequest request{.verb = StoreVerb::kMultiSet};
  StoreResponse values;
  for (size_t i = 0; i < 100; ++i) {
    request.keys.push_back(std::string(i % 7, 'k'));
    request.values.push_back(std::string(i % 40, 'v'));
  }
  values.values = request.values;
  const auto sent = encode(request);
  const auto answer = encode_answer(StoreVerb::kListKeys, values);
  for (const size_t step : {1u, 7u, 64u, 5000u}) {
    Progress progress;
    size_t length = step;
    while (!decode_store_request(ConstBytes(sent).first(std::min(length, sent.size())), progress)
                .value()
                .message) {
      ASSERT_LT(length, sent.size());
      EXPECT_LE(progress.num_needed, sent.size());
      length += step;
    }
    EXPECT_EQ(progress.num_texts, 0u) << "the decoder has reset `progress`";
    Progress of_answer;
    std::optional<StoreResponse> read;
    for (length = step; !read; length += step) {
      read = decode_answer({.verb = StoreVerb::kListKeys},
                           ConstBytes(answer).first(std::min(length, answer.size())), of_answer)
                 .value()
                 .message;
      ASSERT_TRUE(read || length < answer.size());
    }
    EXPECT_EQ(read, values);
    EXPECT_EQ(read_request(sent)->message, request);
  }
}

// When more bytes of a message have arrived, the next call of the decoder must decode only the new
// ones.
TEST(StoreMessage, AnAttemptGoesOnWhereTheOneBeforeEnded) {
  const StoreRequest request{.verb = StoreVerb::kWait, .keys = {"a", "b", "c"}};
  auto bytes = encode(request);
  Progress progress;
  ASSERT_FALSE(decode_store_request(ConstBytes(bytes).first(30), progress)->message);
  EXPECT_EQ(progress.num_texts, 2u);
  EXPECT_EQ(progress.num_bytes, 27u);
  bytes[9] = std::byte{0xff};  // changes the length of "a", which the first call has decoded
  ASSERT_FALSE(decode_store_request(ConstBytes(bytes).first(35), progress)->message);
  EXPECT_EQ(progress.num_needed, 36u);
}

TEST(StoreMessage, RefusesUnknownVerbsAndLengthsOverTheLimits) {
  const std::vector<std::string> wrong = {
      text("\x13"),
      text("\xbf"),
      text("\xc5"),
      text("\xff"),
      text("\x03\x01\x20\0\0\0\0\0\0"),                  // a key of 8193 bytes
      text("\x03\xff\xff\xff\xff\xff\xff\xff\xff"),      // a key of unlimited length
      text("\x01\0\0\0\0\0\0\0\0\x01\0\0\x01\0\0\0\0"),  // a value of 16 MiB + 1
      text("\x06\x01\0\x01\0\0\0\0\0"),                  // 65537 keys
      text("\xc0\x04\0\0\0\0\0\0\0\x41\0\0\0\0\0\0\0"),  // a build of 65 bytes
      text("\xc0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x41\0\0\0\0\0\0\0"),  // a nonce of 65 bytes
      text("\xc1\x41\0\0\0\0\0\0\0"),                                    // a proof of 65 bytes
  };
  for (const std::string& bytes : wrong) {
    const auto refused = read_request(as_bytes(bytes));
    ASSERT_FALSE(refused.ok()) << static_cast<int>(bytes[0]);
    EXPECT_EQ(refused.error().code(), ErrorCode::kCorruption);
  }
}

TEST(StoreMessage, ARequestMayNotGrowOverItsLimitInSmallSteps) {
  // This multi_set has 4 values of 16 MiB, the limit of a value. Together they exceed the 64 MiB of
  // a request.
  ByteWriter writer;
  writer.integer(StoreVerb::kMultiSet);
  writer.integer(uint64_t{100});
  const std::string value(kMaxValueBytes, 'x');
  for (int i = 0; i < 4; ++i) {
    writer.text<uint64_t>("k");
    writer.text<uint64_t>(value);
  }
  EXPECT_FALSE(read_request(writer.bytes()).ok());
}

TEST(StoreMessage, AnswersAreTheBytesThatTorchsServerSends) {
  for (const auto& [request, response, bytes] : answers()) {
    SCOPED_TRACE(to_string(request.verb));
    EXPECT_EQ(as_text(encode_c10d_answer(request.verb, response)), bytes);
    const auto decoded = read_c10d_answer(request, as_bytes(bytes)).value();
    ASSERT_TRUE(decoded.message.has_value());
    EXPECT_EQ(*decoded.message, response);
    EXPECT_EQ(decoded.num_bytes, bytes.size());
  }
}

TEST(StoreMessage, AnswersToARankBeginWithAByteThatTellsErrors) {
  for (const auto& [request, response, bytes] : answers()) {
    SCOPED_TRACE(to_string(request.verb));
    const std::string whole = std::string(1, '\0') + bytes;
    EXPECT_EQ(as_text(encode_answer(request.verb, response)), whole);
    EXPECT_EQ(*read_answer(request, as_bytes(whole)).value().message, response);
    for (size_t length = 0; length < whole.size(); ++length) {
      const auto cut = read_answer(request, as_bytes(whole).first(length)).value();
      EXPECT_FALSE(cut.message.has_value());
      EXPECT_GT(cut.num_bytes, length);
      EXPECT_LE(cut.num_bytes, whole.size());
    }
  }
  const StoreRequest get{.verb = StoreVerb::kGet, .keys = {"k"}};
  const StoreResponse late{.error = Error(ErrorCode::kTimeout, "no")};
  const std::string bytes = text("\x02\x02\0\0\0\0\0\0\0no");
  EXPECT_EQ(as_text(encode_answer(get.verb, late)), bytes);
  EXPECT_EQ(*read_answer(get, as_bytes(bytes)).value().message, late);
}

TEST(StoreMessage, TheExampleOfTheFormatPage) {
  const StoreRequest add{.verb = StoreVerb::kAdd, .amount = -1, .keys = {"n"}};
  EXPECT_EQ(as_text(encode(add)), text("\x04\x01\0\0\0\0\0\0\0n\xff\xff\xff\xff\xff\xff\xff\xff"));
  EXPECT_EQ(as_text(encode_answer(add.verb, {.number = 4})), text("\0\x04\0\0\0\0\0\0\0"));
}

TEST(StoreMessage, AnswersThatMakeNoSenseAreRefused) {
  const auto refuses = [](StoreVerb verb, const std::string& bytes) {
    const auto answer = read_answer({.verb = verb}, as_bytes(bytes));
    return !answer.ok() && answer.error().code() == ErrorCode::kCorruption;
  };
  EXPECT_TRUE(refuses(StoreVerb::kHello, "HTTP/1.1 400 Bad Request"));
  EXPECT_TRUE(refuses(StoreVerb::kGet, text("\x08")));  // error code 8 does not exist
  // The text of the error is longer than 64 KiB.
  EXPECT_TRUE(refuses(StoreVerb::kGet, text("\x01\x01\0\x01\0\0\0\0\0")));
  EXPECT_TRUE(refuses(StoreVerb::kWait, text("\0\x02")));                      // 2 is no valid bool
  EXPECT_TRUE(refuses(StoreVerb::kListKeys, text("\0\x01\0\x01\0\0\0\0\0")));  // 65537 keys
  // The value is longer than 16 MiB.
  EXPECT_TRUE(refuses(StoreVerb::kGet, text("\0\x01\0\0\x01\0\0\0\0")));
}

TEST(StoreMessage, ARequestOfAnotherShapeIsRefused) {
  const std::vector<StoreRequest> wrong = {
      {.verb = StoreVerb::kSet, .keys = {"k"}},
      {.verb = StoreVerb::kGet, .keys = {"a", "b"}},
      {.verb = StoreVerb::kMultiSet, .keys = {"a"}},
      {.verb = StoreVerb::kNumKeys, .values = {"v"}},
      {.verb = static_cast<StoreVerb>(kNumC10dVerbs)},
      {.verb = static_cast<StoreVerb>(0xC5)},
  };
  for (const StoreRequest& request : wrong) {
    EXPECT_EQ(check_shape(request).error().code(), ErrorCode::kCorruption);
  }
}

}  // namespace
}  // namespace cadre::wire
