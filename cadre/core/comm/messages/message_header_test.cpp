// Compares the header of messages with bytes written by hand from docs/formats/point-to-point.md.
#include "cadre/core/comm/messages/message_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/testing/core/paths.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> documented_bytes() {
  std::vector<std::byte> bytes;
  for (const int value : {0x43, 0x44, 0x4d, 0x32, 1, 4, 0, 0, 0xfe, 0xff, 0xff, 0xff, 5, 0, 0, 0,
                          3,    0,    0,    0,    0, 0, 0, 0, 0,    0,    1,    0,    0, 0, 0, 0}) {
    bytes.push_back(static_cast<std::byte>(value));
  }
  return bytes;
}

const MessageHeader kDocumented{MessageHeader::Kind::kRequest, DType::kFloat32, -2, 3, 65536, 5};

TEST(MessageHeader, ReadsAndWritesTheDocumentedBytes) {
  const auto bytes = documented_bytes();
  const auto header = MessageHeader::parse(bytes);
  ASSERT_TRUE(header.ok());
  EXPECT_EQ(*header, kDocumented);
  EXPECT_TRUE(std::ranges::equal(kDocumented.encode(), bytes));
}

TEST(MessageHeader, RefusesWhatNoRankSends) {
  // Each pair is an offset and an invalid value there. At 4 and 26 the size does not fit the kind.
  for (const auto& [at, value] :
       {std::pair{0, 0}, {4, 4}, {4, 0}, {5, kNumDTypes}, {6, 1}, {26, 0}}) {
    auto bytes = documented_bytes();
    bytes[static_cast<size_t>(at)] = static_cast<std::byte>(value);
    const auto header = MessageHeader::parse(bytes);
    ASSERT_FALSE(header.ok()) << at;
    EXPECT_EQ(header.error().code(), ErrorCode::kCorruption);
    EXPECT_THAT(header.error().message(), HasSubstr("check that all ranks run the same build"));
  }
}

// Returns the codes of an enum as the pages list them: "0 uint8, 1 int32, ...".
template <typename Enum>
std::string listing(int num_values) {
  std::string text;
  for (int code = 0; code < num_values; ++code) {
    text += format("{}{} {}", code == 0 ? "| " : ", ", code, static_cast<Enum>(code));
  }
  return text + " |";
}

std::string page(const std::string& name) {
  const std::string path = testing::source_path("docs/formats/" + name);
  return os::read_file(path, 1 << 20).value_or_throw();
}

TEST(Codes, StandOnThePagesOfTheFormats) {
  const std::string dtypes = listing<DType>(kNumDTypes);
  EXPECT_THAT(page("net-messages.md"), HasSubstr("| dtype " + dtypes));
  EXPECT_THAT(page("net-messages.md"),
              HasSubstr("| reduce op " + listing<ReduceOp>(kNumReduceOps)));
  EXPECT_THAT(page("point-to-point.md"), HasSubstr(dtypes));
}

}  // namespace
}  // namespace cadre
