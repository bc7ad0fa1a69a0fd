#include "cadre/core/collective/part_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace cadre {
namespace {

using PartBytes = std::vector<uint64_t>;

// Rank r sends 10 r + s bytes to rank s.
PartTable table_of(int world_size) {
  PartTable table(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    PartSizes sizes;
    for (int other = 0; other < world_size; ++other) {
      sizes.sent.push_back(static_cast<uint64_t>(10 * rank + other));
      sizes.received.push_back(static_cast<uint64_t>(10 * other + rank));
    }
    table.set_row(rank, sizes);
  }
  return table;
}

Status check(const PartTable& table, OpProgress& progress) {
  const Fingerprint fingerprint =
      OpDescriptor{OpKind::kAllToAllV, DType::kFloat32, ReduceOp::kSum, 0, 0}.fingerprint();
  return table.check({.number = 7,
                      .fingerprints = std::span(&fingerprint, 1),
                      .deadline = Deadline(TimePoint{}),
                      .progress = progress});
}

TEST(PartTable, ARowHasWhatARankSendsAndExpects) {
  const PartTable table = table_of(3);
  EXPECT_TRUE(std::ranges::equal(table.sent(1), PartBytes{10, 11, 12}));
  EXPECT_TRUE(std::ranges::equal(table.received(1), PartBytes{1, 11, 21}));
  EXPECT_EQ(table.longest_part(), 22U);
  EXPECT_EQ(table.most_sent(), 20U + 21 + 22);
  OpProgress progress;
  EXPECT_TRUE(check(table, progress).ok());
  EXPECT_EQ(progress.part_mismatch.sender, -1);
}

TEST(PartTable, RowsAreExchangedAsBytes) {
  PartTable whole = table_of(3);
  EXPECT_EQ(PartTable::row_bytes(3), 48U);
  PartTable copy(3);
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(copy.row(rank).size(), 48U);
    std::memcpy(copy.row(rank).data(), whole.row(rank).data(), 48);
  }
  EXPECT_TRUE(std::ranges::equal(copy.bytes(), whole.bytes()));
  EXPECT_EQ(whole.row(1).data() - whole.bytes().data(), 48);
}

TEST(PartTable, TheFirstPartOfWhichTwoRanksDisagreeIsNamed) {
  PartTable table = table_of(3);
  table.set_row(2, {.sent = {20, 21, 22}, .received = {2, 99, 22}});
  OpProgress progress;
  const Status status = check(table, progress);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(status.error().message(),
            "all_to_all_v(float32) #7: rank 1 sends 12 bytes to rank 2, which expects 99");
  EXPECT_EQ(progress.part_mismatch.sender, 1);
  EXPECT_EQ(progress.part_mismatch.receiver, 2);
  EXPECT_EQ(progress.part_mismatch.sent_bytes, 12U);
  EXPECT_EQ(progress.part_mismatch.expected_bytes, 99U);
}

TEST(PartTable, OfNoRanksIsEmpty) {
  EXPECT_EQ(PartTable(0).longest_part(), 0U);
}

}  // namespace
}  // namespace cadre
