#include "cadre/core/wire/tokens/token_file_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cadre::wire {
namespace {

using HeaderBytes = std::array<std::byte, kTokenFileHeaderBytes>;

std::string refusal_of_header(ConstBytes bytes, uint64_t file_bytes) {
  const auto header = parse_token_file_header(bytes, file_bytes);
  if (header.ok()) return "accepted";
  EXPECT_EQ(header.error().code(), ErrorCode::kCorruption);
  return header.error().message();
}

TEST(TokenFileHeader, HasTheBytesOfLlmC) {
  const HeaderBytes two = encode_token_file_header({.num_tokens = 258, .bytes_per_token = 2});
  // 20240520 = 0x0134d888
  const std::vector<int> expected = {0x88, 0xd8, 0x34, 0x01, 1, 0, 0, 0, 2, 1, 0, 0};
  for (size_t i = 0; i < two.size(); ++i) {
    EXPECT_EQ(std::to_integer<int>(two[i]), i < expected.size() ? expected[i] : 0) << i;
  }
  EXPECT_EQ(*parse_token_file_header(two, 1024 + 516),
            (TokenFileHeader{.num_tokens = 258, .bytes_per_token = 2}));
  const HeaderBytes four = encode_token_file_header({.num_tokens = 3, .bytes_per_token = 4});
  EXPECT_EQ(*parse_token_file_header(four, 1024 + 12),
            (TokenFileHeader{.num_tokens = 3, .bytes_per_token = 4}));
}

TEST(TokenFileHeader, DamageIsNamedWithItsOffset) {
  using ::testing::HasSubstr;
  const HeaderBytes valid = encode_token_file_header({.num_tokens = 10, .bytes_per_token = 2});
  EXPECT_EQ(refusal_of_header(valid, 1044), "accepted");
  EXPECT_THAT(refusal_of_header(valid, 1043), HasSubstr("at byte 8: the number of tokens is 10, "
                                                        "which gives a file of 1044 bytes, and "
                                                        "the file has 1043"));
  EXPECT_THAT(refusal_of_header(valid, 1046), HasSubstr("the file has 1046"));
  EXPECT_THAT(refusal_of_header(ConstBytes(valid).first(100), 100),
              HasSubstr("at byte 100: the file ends within its header"));
  EXPECT_THAT(refusal_of_header({}, 0), HasSubstr("at byte 0: the file ends"));
  const auto changed = [&](size_t at) {
    HeaderBytes bytes = valid;
    bytes[at] ^= std::byte{0x80};
    return bytes;
  };
  EXPECT_THAT(refusal_of_header(changed(0), 1044), HasSubstr("at byte 0: the magic is 20240392"));
  EXPECT_THAT(refusal_of_header(changed(4), 1044), HasSubstr("at byte 4: the version is 129"));
  EXPECT_THAT(refusal_of_header(changed(11), 1044),
              HasSubstr("at byte 8: the number of tokens is -"));
  // The magic of one kind with the version of the other.
  HeaderBytes mixed = encode_token_file_header({.num_tokens = 10, .bytes_per_token = 4});
  mixed[4] = std::byte{1};
  EXPECT_THAT(refusal_of_header(mixed, 1064), HasSubstr("the version is 1 instead of 7"));
}

}  // namespace
}  // namespace cadre::wire
