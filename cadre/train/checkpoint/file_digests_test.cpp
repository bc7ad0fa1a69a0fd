#include "cadre/train/checkpoint/file_digests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::file_digests_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The BLAKE2b digest of "abc", from RFC 7693, appendix A.
constexpr std::string_view kDigestOfAbc =
    "ba80a53f981c4d0d6a2797b69f12f6e94c212f14685ac4b74b12bb6fdbffa2d1"
    "7d87c5392aab792dc252d5de4533cc9518d38aa8dbf1925ab92386edd4009923";
constexpr std::array<std::string_view, 2> kNames = {"abc", "two words"};

class FileDigestsTest : public ::testing::Test {
 protected:
  FileDigestsTest() {
    write("abc", "abc");
    write("two words", "another content");
    EXPECT_TRUE(write_digests(folder_.path(), kNames).ok());
  }

  void write(const std::string& name, std::string_view content) const {
    std::ofstream(folder_.file(name), std::ios::binary) << content;
  }
  std::string list() const {
    std::ostringstream text;
    text << std::ifstream(folder_.file("B2SUMS"), std::ios::binary).rdbuf();
    return text.str();
  }
  // Returns the code and the message of the error that check_digests() returns for the folder.
  std::string refusal() const {
    const Status status = check_digests(folder_.path(), kNames);
    if (status.ok()) return "accepted";
    EXPECT_EQ(status.error().code(), ErrorCode::kCorruption);
    return status.error().message();
  }

  const testing::TemporaryFolder folder_;
};

TEST_F(FileDigestsTest, TheListHasTheFormOfB2sum) {
  EXPECT_EQ(list().substr(0, list().find('\n')), std::string(kDigestOfAbc) + "  abc");
  EXPECT_EQ(refusal(), "accepted");
}

TEST_F(FileDigestsTest, OneByteThatDiffersNamesItsFile) {
  write("two words", "another Content");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("/two words: its bytes do not match"),
                               HasSubstr("its digest in B2SUMS")));
}

TEST_F(FileDigestsTest, AFileThatIsMissingIsNamed) {
  const auto digest = digest_of(folder_.file("none"));
  ASSERT_FALSE(digest.ok());
  EXPECT_EQ(digest.error().code(), ErrorCode::kCorruption);
  EXPECT_THAT(digest.error().message(), HasSubstr("/none is missing"));
}

TEST_F(FileDigestsTest, AListThatIsCutOrChangedIsDamaged) {
  const std::string whole = list();
  const std::string first_line = whole.substr(0, whole.find('\n') + 1);
  write("B2SUMS", first_line);
  EXPECT_THAT(refusal(), HasSubstr("it has no digest of two words"));
  std::string upper = whole;
  upper[0] = 'B';
  const std::string no_name = std::string(kDigestOfAbc) + "  \n";
  const std::string one_space = std::string(kDigestOfAbc) + " abc\n";
  for (const std::string& damaged :
       {whole.substr(0, whole.size() - 1), whole.substr(1), upper, no_name, one_space}) {
    write("B2SUMS", damaged);
    EXPECT_THAT(refusal(), HasSubstr("a line is not a digest and a file name")) << damaged;
  }
}

}  // namespace
}  // namespace cadre::file_digests_test
