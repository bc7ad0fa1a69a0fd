#include "cadre/core/wire/store/store_message.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/framing.h"

namespace cadre::wire {
namespace {

StoreHello sample_hello() {
  StoreHello hello{.build = "0.1.0"};
  for (size_t i = 0; i < hello.nonce.size(); ++i) hello.nonce[i] = static_cast<std::byte>(i);
  return hello;
}

std::vector<StoreRequest> sample_requests() {
  const std::string bytes("\0\xff", 2);
  return {
      {.id = 1, .verb = StoreVerb::kSet, .keys = {"k"}, .values = {bytes}},
      {.id = 2, .verb = StoreVerb::kGet, .keys = {""}},
      {.id = 3, .verb = StoreVerb::kAdd, .amount = -7, .keys = {"n"}},
      {.id = 4, .verb = StoreVerb::kWait, .keys = {"a", "b", "c"}},
      {.id = 5, .verb = StoreVerb::kCheck},
      {.id = 6, .verb = StoreVerb::kCompareSet, .keys = {"k"}, .values = {"", "new"}},
      {.id = 7, .verb = StoreVerb::kErase, .keys = {bytes}},
      {.id = 8, .verb = StoreVerb::kNumKeys},
      {.id = 9, .verb = StoreVerb::kAppend, .keys = {"k"}, .values = {"more"}},
      {.id = 10, .verb = StoreVerb::kMultiGet, .keys = {"a", "b"}},
      {.id = 11, .verb = StoreVerb::kMultiSet, .keys = {"a", "b"}, .values = {"1", "2"}},
      {.id = ~uint64_t{0}, .verb = StoreVerb::kCancel},
      {.id = 12, .verb = StoreVerb::kQueuePush, .keys = {"q"}, .values = {bytes}},
      {.id = 13, .verb = StoreVerb::kQueuePop, .keys = {"q"}},
      {.id = 14, .verb = StoreVerb::kTryQueuePop, .keys = {"q"}},
      {.id = 15, .verb = StoreVerb::kQueueLength, .keys = {"q"}},
      {.id = 16, .verb = StoreVerb::kListKeys},
      {.id = 17, .verb = StoreVerb::kBarrier, .amount = 8, .keys = {"b"}},
      {.id = 18, .verb = StoreVerb::kLeaveWill, .keys = {"k"}, .values = {"gone"}},
      {.id = 19, .verb = StoreVerb::kRetractWill},
  };
}

std::vector<StoreResponse> sample_responses() {
  return {{.id = 1},
          {.id = 2, .number = -5, .values = {"", std::string(1000, 'x')}},
          {.id = 3, .error = Error(ErrorCode::kInvalidArgument, "no")},
          {.id = 4, .error = Error(ErrorCode::kInternal, "")}};
}

// Every prefix of a message, and the message with a byte behind it, is refused as kCorruption.
template <typename Decode>
void expect_refuses_other_lengths(const std::vector<std::byte>& message, Decode decode) {
  for (size_t length = 0; length < message.size(); ++length) {
    const auto result = decode(ConstBytes(message).first(length));
    ASSERT_FALSE(result.ok()) << "accepted " << length << " of " << message.size() << " bytes";
    EXPECT_EQ(result.error().code(), ErrorCode::kCorruption);
  }
  std::vector<std::byte> longer = message;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(decode(longer).ok());
}

TEST(StoreMessage, EverythingComesBackAsItWasWritten) {
  EXPECT_EQ(decode_store_hello(encode(sample_hello())).value(), sample_hello());
  const StoreProof proof{.digest = {std::byte{1}, std::byte{2}}};
  EXPECT_EQ(decode_store_proof(encode(proof)).value(), proof);
  for (const StoreRequest& request : sample_requests()) {
    EXPECT_EQ(decode_store_request(encode(request)).value(), request) << to_string(request.verb);
  }
  for (const StoreResponse& response : sample_responses()) {
    EXPECT_EQ(decode_store_response(encode(response)).value(), response);
  }
}

TEST(StoreMessage, CutMessagesAreRefused) {
  expect_refuses_other_lengths(encode(sample_hello()), decode_store_hello);
  expect_refuses_other_lengths(encode(StoreProof{}), decode_store_proof);
  for (const StoreRequest& request : sample_requests()) {
    expect_refuses_other_lengths(encode(request), decode_store_request);
  }
  expect_refuses_other_lengths(encode(sample_responses()[2]), decode_store_response);
}

// The bytes of docs/formats/store-native.md: what is in the field stays readable.
TEST(StoreMessage, TheBytesAreThoseOfTheFormatPage) {
  const StoreRequest add{.id = 0x0102, .verb = StoreVerb::kAdd, .amount = -1, .keys = {"n"}};
  EXPECT_EQ(as_text(encode(add)), std::string("\x02\x01\0\0\0\0\0\0"              // id
                                              "\x02"                              // verb
                                              "\xff\xff\xff\xff\xff\xff\xff\xff"  // amount
                                              "\x01\0\0\0"                        // one key
                                              "\x01\0\0\0n"                       // "n"
                                              "\0\0\0\0",                         // no value
                                              30));
  const StoreResponse response{.id = 1, .number = 3, .values = {"ab"}};
  EXPECT_EQ(as_text(encode(response)), std::string("\x01\0\0\0\0\0\0\0"  // id
                                                   "\0"                  // no error
                                                   "\x03\0\0\0\0\0\0\0"  // number
                                                   "\x01\0\0\0"          // one value
                                                   "\x02\0\0\0ab",
                                                   27));
  StoreHello hello{.build = "0.1.0"};
  hello.nonce.fill(std::byte{'n'});
  const std::string expected_hello = std::string(
                                         "\x03\0"  // protocol
                                         "\x05"
                                         "0.1.0",
                                         8)
                                         .append(32, 'n');
  EXPECT_EQ(as_text(encode(hello)), expected_hello);
  StoreProof proof;
  proof.digest.fill(std::byte{'p'});
  EXPECT_EQ(as_text(encode(proof)), std::string(32, 'p'));
  const StoreResponse refusal{.id = 2, .error = Error(ErrorCode::kTimeout, "no")};
  EXPECT_EQ(as_text(encode(refusal)), std::string("\x02\0\0\0\0\0\0\0"  // id
                                                  "\x02"                // kTimeout
                                                  "\x02\0\0\0no",
                                                  15));
}

// A set of "k" to "v", as a whole stream of a client: the magic, and a frame.
TEST(StoreMessage, AStreamBeginsWithTheMagicAndFramesHaveTheirLength) {
  StreamBuffer stream;
  stream.append(as_bytes(kStoreMagic));
  append_frame(stream, encode(StoreRequest{.id = 1, .keys = {"k"}, .values = {"v"}}));
  EXPECT_EQ(as_text(stream.view()), std::string("CDRS"
                                                "\x23\0\0\0"          // 35 bytes follow
                                                "\x01\0\0\0\0\0\0\0"  // id
                                                "\0"                  // set
                                                "\0\0\0\0\0\0\0\0"    // amount
                                                "\x01\0\0\0"
                                                "\x01\0\0\0k"
                                                "\x01\0\0\0"
                                                "\x01\0\0\0v",
                                                43));
}

TEST(StoreMessage, AHelloOfALaterProtocolIsReadAsFarAsItIsKnown) {
  StoreHello later = sample_hello();
  later.protocol = kStoreProtocol + 1;
  std::vector<std::byte> bytes = encode(later);
  bytes.push_back(std::byte{9});
  EXPECT_EQ(decode_store_hello(bytes).value(), later);
}

TEST(StoreMessage, WrongCountsVerbsAndCodesAreRefused) {
  EXPECT_FALSE(
      decode_store_request(encode(StoreRequest{.verb = StoreVerb::kSet, .keys = {"k"}})).ok());
  EXPECT_FALSE(
      decode_store_request(encode(StoreRequest{.verb = StoreVerb::kGet, .keys = {"a", "b"}})).ok());
  EXPECT_FALSE(
      decode_store_request(encode(StoreRequest{.verb = StoreVerb::kMultiSet, .keys = {"a"}})).ok());
  std::vector<std::byte> request = encode(StoreRequest{.verb = StoreVerb::kNumKeys});
  request[8] = static_cast<std::byte>(kNumStoreVerbs);
  EXPECT_FALSE(decode_store_request(request).ok());
  std::vector<std::byte> response = encode(sample_responses()[2]);
  response[8] = std::byte{200};
  EXPECT_FALSE(decode_store_response(response).ok());
}

TEST(StoreMessage, LengthsOverTheLimitsAreRefused) {
  const std::string long_key(kMaxKeyBytes + 1, 'k');
  EXPECT_FALSE(
      decode_store_request(encode(StoreRequest{.verb = StoreVerb::kGet, .keys = {long_key}})).ok());
  const std::vector<std::string> many(kMaxKeysPerRequest + 1);
  EXPECT_FALSE(
      decode_store_request(encode(StoreRequest{.verb = StoreVerb::kWait, .keys = many})).ok());
  const StoreHello hello{.build = std::string(kMaxBuildBytes + 1, '1')};
  EXPECT_FALSE(decode_store_hello(encode(hello)).ok());
}

}  // namespace
}  // namespace cadre::wire
