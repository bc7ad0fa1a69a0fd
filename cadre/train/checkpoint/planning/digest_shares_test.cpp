#include "cadre/train/checkpoint/planning/digest_shares.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace cadre {
namespace {

using ::testing::ElementsAre;
using Files = std::vector<size_t>;

FileView view(std::string sight, Files files) {
  return {.options = "", .fingerprint = "", .sight = std::move(sight), .files = std::move(files)};
}

TEST(DigestShares, RanksThatSeeTheSameFilesDivideThem) {
  const std::vector<FileView> views(2, view("a", {0, 1, 2, 3}));
  EXPECT_THAT(share_digests(views, std::vector<uint64_t>{9, 1, 1, 1}),
              ElementsAre(Files{0}, Files{1, 2, 3}));
}

TEST(DigestShares, EachSightComparesWhatItsRanksRead) {
  const std::vector<FileView> views = {view("a", {0, 1}), view("b", {1}), view("a", {2}),
                                       view("c", {0, 1, 2})};
  const std::vector<uint64_t> num_bytes = {5, 5, 5, 5};
  const auto shares = share_digests(views, num_bytes);
  ASSERT_EQ(shares.size(), 4U);
  std::multiset<size_t> of_a(shares[0].begin(), shares[0].end());
  of_a.insert(shares[2].begin(), shares[2].end());
  of_a.erase(3);
  EXPECT_THAT(of_a, ElementsAre(0, 1, 2));
  // No rank reads the last file. Rank 1 gets it, because it has the fewest bytes to compare.
  EXPECT_EQ(shares[1], (Files{1, 3}));
  EXPECT_EQ(shares[3], (Files{0, 1, 2}));
}

TEST(DigestShares, AViewIsReadBackAndNoOtherTextIsOne) {
  const FileView whole = {.options = "od", .fingerprint = "f", .sight = "s", .files = {0, 7}};
  const std::string text = encode_file_view(whole);
  EXPECT_EQ(*decode_file_view(text), whole);
  for (size_t length = 0; length < text.size(); ++length) {
    const auto cut = decode_file_view(std::string_view(text).substr(0, length));
    EXPECT_TRUE(!cut.ok() || cut->files.size() < whole.files.size()) << length;
  }
}

}  // namespace
}  // namespace cadre
