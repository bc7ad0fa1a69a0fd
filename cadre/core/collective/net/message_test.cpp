#include "cadre/core/collective/net/message.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

namespace cadre {
namespace {

constexpr OperationHeader kHeader = {
    .kind = OperationHeader::Kind::kRefusal,
    .algorithm = Algorithm::kBruck,
    .number = 0x0102030405060708,
    .fingerprint = {.call = 0x1112131415161718, .shape = 0x2122232425262728}};

// These bytes were written by hand from docs/formats/net-messages.md.
TEST(MessageTest, HeaderHasTheDocumentedBytes) {
  constexpr char kExpected[] =
      "CDO3\x01\x05\x00\x00"
      "\x08\x07\x06\x05\x04\x03\x02\x01"
      "\x18\x17\x16\x15\x14\x13\x12\x11"
      "\x28\x27\x26\x25\x24\x23\x22\x21";
  const auto bytes = kHeader.encode();
  ASSERT_EQ(sizeof(kExpected) - 1, bytes.size());
  EXPECT_EQ(std::memcmp(bytes.data(), kExpected, bytes.size()), 0);
  EXPECT_EQ(*OperationHeader::parse(bytes), kHeader);
}

TEST(MessageTest, RefusesEveryFieldThatNoRankSends) {
  struct Lie {
    size_t at;
    int value;
    const char* named;
  };
  for (const Lie& lie : {Lie{0, 'X', "magic"}, Lie{4, 3, "kind"}, Lie{5, 0, "algorithm"},
                         Lie{5, 9, "algorithm"}, Lie{6, 1, "reserved"}, Lie{7, 1, "reserved"}}) {
    auto bytes = kHeader.encode();
    bytes[lie.at] = static_cast<std::byte>(lie.value);
    const auto header = OperationHeader::parse(bytes);
    ASSERT_FALSE(header.ok()) << lie.named;
    EXPECT_EQ(header.error().code(), ErrorCode::kCorruption);
    EXPECT_THAT(header.error().message(), ::testing::HasSubstr(lie.named));
  }
}

TEST(MessageTest, RefusesOtherLengths) {
  const auto bytes = kHeader.encode();
  EXPECT_FALSE(OperationHeader::parse(ConstBytes(bytes).first(bytes.size() - 1)).ok());
}

}  // namespace
}  // namespace cadre
