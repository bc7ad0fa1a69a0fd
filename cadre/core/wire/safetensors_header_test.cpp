#include "cadre/core/wire/safetensors_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>
#include <string>

namespace cadre::wire {
namespace {

using ::testing::HasSubstr;

std::string with_length(const std::string& json) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>((json.size() >> (8 * i)) & 0xff);
  return bytes + json;
}

Result<SafetensorsHeader> parse(const std::string& bytes, uint64_t data_bytes = 0) {
  return parse_safetensors_header(std::as_bytes(std::span(bytes)), bytes.size() + data_bytes);
}

std::string one_tensor(const std::string& fields) {
  return "{\"w\":{" + fields + "}}";
}

TEST(SafetensorsHeader, ReadsAFileWrittenByHand) {
  const auto header = parse(with_length(R"({"__metadata__":{"format":"pt"},)"
                                        R"("b":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
                                        R"("a":{"dtype":"BF16","shape":[2,3],)"
                                        R"("data_offsets":[4,16]}}   )"),
                            16);
  ASSERT_TRUE(header.ok()) << header.error().message();
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0], (SafetensorsEntry{"b", "F32", {}, 0, 4}));
  EXPECT_EQ(header->tensors[1], (SafetensorsEntry{"a", "BF16", {2, 3}, 4, 16}));
  EXPECT_EQ(header->metadata.at("format"), "pt");
}

TEST(SafetensorsHeader, WritesTheFormatsOwnBytes) {
  SafetensorsHeader header;
  header.tensors = {{"w", "F32", {2}, 0, 8}};
  const std::string json = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  std::string expected = with_length(json + std::string((8 - json.size() % 8) % 8, ' '));
  EXPECT_EQ(encode_safetensors_header(header), expected);
  EXPECT_EQ(encode_safetensors_header(header).size() % 8, 0u);
}

TEST(SafetensorsHeader, AcceptsEmptyTensorsAndAnEmptyFile) {
  EXPECT_TRUE(parse(with_length("{}")).ok());
  EXPECT_TRUE(
      parse(with_length(one_tensor(R"("dtype":"I64","shape":[0,7],"data_offsets":[0,0])"))).ok());
}

struct Refusal {
  std::string name;
  std::string bytes;
  uint64_t data_bytes;
  std::string message;
};

class SafetensorsRefusal : public ::testing::TestWithParam<Refusal> {};

TEST_P(SafetensorsRefusal, NamesWhatIsWrong) {
  const auto header = parse(GetParam().bytes, GetParam().data_bytes);
  ASSERT_FALSE(header.ok());
  EXPECT_EQ(header.error().code(), ErrorCode::kCorruption);
  EXPECT_THAT(header.error().message(), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    All, SafetensorsRefusal,
    ::testing::Values(
        Refusal{"Short", "abc", 0, "3 bytes; expected at least 8"},
        Refusal{"Huge", std::string(8, '\xff'), 0, "at most 100000000 are allowed"},
        Refusal{"Truncated", with_length("{}").substr(0, 9), 0, "but the file has 9"},
        Refusal{"NoObject", with_length("[]"), 0, "does not start with '{'"},
        Refusal{"NoJson", with_length("{\"a\":"), 0, "no valid JSON"},
        Refusal{"Trailing", with_length("{}{}"), 0, "no valid JSON"},
        Refusal{"Deep", with_length("{\"a\":{\"shape\":[[1]]}}"), 0, "an array under key 'shape'"},
        Refusal{"Number", with_length("{\"a\":1}"), 0, "a number under key 'a'"},
        Refusal{"Missing", with_length(one_tensor(R"("dtype":"F32","shape":[])")), 0, "lacks"},
        Refusal{"Unknown", with_length(one_tensor(R"("dtype":"F32","x":1)")), 0,
                "unknown field 'x'"},
        Refusal{"TwiceName",
                with_length(R"({"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},)"
                            R"("w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})"),
                0, "occurs twice"},
        Refusal{"TwiceField", with_length(one_tensor(R"("dtype":"F32","dtype":"F32")")), 0,
                "has dtype twice"},
        Refusal{"DType",
                with_length(one_tensor(R"("dtype":"F31","shape":[1],"data_offsets":[0,4])")), 4,
                "unknown dtype 'F31'"},
        Refusal{"OneOffset",
                with_length(one_tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4])")), 4,
                "1 data_offsets"},
        Refusal{"Negative",
                with_length(one_tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])")), 4,
                "a negative number"},
        Refusal{"Shape",
                with_length(one_tensor(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])")), 4,
                "contradict"},
        Refusal{"Overflow",
                with_length(one_tensor(
                    R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])")),
                0, "contradict"},
        Refusal{"Backwards",
                with_length(one_tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,-1])")), 1,
                "a negative number"},
        Refusal{"Hole", with_length(one_tensor(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])")),
                2, "expected it to begin at 0"},
        Refusal{"Overlap",
                with_length(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                            R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})"),
                3, "expected it to begin at 2"},
        Refusal{"Uncovered",
                with_length(one_tensor(R"("dtype":"U8","shape":[1],"data_offsets":[0,1])")), 2,
                "cover 1 bytes, but the file holds 2"},
        Refusal{"Metadata", with_length(R"({"__metadata__":{"a":1}})"), 0, "a number under key"}),
    [](const auto& param) { return param.param.name; });

TEST(SafetensorsHeader, SurvivesEveryTruncationAndEveryFlippedByte) {
  SafetensorsHeader header;
  header.tensors = {{"w", "F32", {2}, 0, 8}, {"b", "U8", {3}, 8, 11}};
  header.metadata = {{"step", "1"}};
  const std::string good = encode_safetensors_header(header);
  for (size_t n = 0; n < good.size(); ++n) {
    EXPECT_FALSE(parse(good.substr(0, n), 11).ok()) << n;
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[n] = static_cast<char>(bad[n] ^ (1 << bit));
      const auto parsed = parse(bad, 11);
      // A damaged header may still be valid, for example with another tensor name. Then its tensors
      // must still cover all data.
      if (parsed.ok() && !parsed->tensors.empty()) {
        EXPECT_EQ(parsed->tensors.back().end, 11u);
      }
    }
  }
}

}  // namespace
}  // namespace cadre::wire
