#include "cadre/core/wire/recovery/recovery_files.h"

#include <gtest/gtest.h>

#include <limits>

namespace cadre {
namespace {

MembershipFile complete_membership() {
  MembershipFile file{.number = 7, .variables = {}};
  for (const std::string_view name : kMembershipVariables) {
    file.variables.emplace_back(name, "of " + std::string(name));
  }
  return file;
}

TEST(RecoveryFiles, HaveTheDocumentedFormat) {
  EXPECT_EQ(encode_recovery_file({.comes_within = std::chrono::seconds(30)}),
            "cadre-recovery 1\nstate running\nmemberships 0\ncomes-within-ms 30000\n");
  EXPECT_EQ(encode_recovery_file({.is_waiting = true, .num_memberships = 2}),
            "cadre-recovery 1\nstate waiting\nmemberships 2\ncomes-within-ms 0\n");
  EXPECT_EQ(encode_membership_file(complete_membership()).substr(0, 51),
            "cadre-membership 1\nnumber 7\nRANK=of RANK\nLOCAL_RANK");
  EXPECT_EQ(encode_lost_ranks_file({.num_memberships = 2, .ranks = {{4, 7}, {12, 12}}}),
            "cadre-lost-ranks 1\nmemberships 2\nranks 4-7\nranks 12-12\n");
}

TEST(RecoveryFiles, AreReadAsTheyWereWritten) {
  for (const RecoveryFile& file :
       {RecoveryFile{}, RecoveryFile{.is_waiting = true,
                        .num_memberships = std::numeric_limits<uint64_t>::max(),
                        .comes_within = std::chrono::milliseconds(1)}}) {
    const std::string text = encode_recovery_file(file);
    EXPECT_LE(text.size(), kMaxRecoveryFileBytes);
    EXPECT_EQ(parse_recovery_file(text), file) << text;
  }
  EXPECT_EQ(parse_membership_file(encode_membership_file(complete_membership())),
            complete_membership());
  const LostRanksFile lost{.num_memberships = std::numeric_limits<uint64_t>::max(),
                           .ranks = {{0, 0}, {7, std::numeric_limits<int>::max()}}};
  EXPECT_EQ(parse_lost_ranks_file(encode_lost_ranks_file(lost)), lost);
  EXPECT_EQ(complete_membership().find("MASTER_PORT"), "of MASTER_PORT");
  EXPECT_EQ(complete_membership().find("PATH"), std::nullopt);
}

TEST(RecoveryFiles, AnythingElseIsNoSuchFile) {
  const std::string recovery = encode_recovery_file({.is_waiting = true});
  for (size_t size = 0; size < recovery.size(); ++size) {
    EXPECT_EQ(parse_recovery_file(recovery.substr(0, size)), std::nullopt) << size;
  }
  const std::string membership = encode_membership_file(complete_membership());
  for (size_t size = 0; size < membership.size(); ++size) {
    EXPECT_EQ(parse_membership_file(membership.substr(0, size)), std::nullopt) << size;
  }
  const std::string lost = encode_lost_ranks_file({.num_memberships = 2, .ranks = {{4, 7}}});
  for (size_t size = 0; size < lost.size(); ++size) {
    EXPECT_EQ(parse_lost_ranks_file(lost.substr(0, size)), std::nullopt) << size;
  }
  for (const char* more : {"x", "\n", "ranks 1\n", "ranks 2-1\n", "ranks -1-2\n", "ranks 1--2\n",
                           "ranks 1-2 \n", "ranks 1-99999999999\n"}) {
    EXPECT_EQ(parse_lost_ranks_file(lost + more), std::nullopt) << more;
  }
  EXPECT_EQ(parse_recovery_file(recovery + "x"), std::nullopt);
  for (const char* more : {"RANK=1\n", "PATH=/\n", "x\n", "\n"}) {
    EXPECT_EQ(parse_membership_file(membership + more), std::nullopt) << more;
  }
  for (const char* other :
       {"cadre-recovery 2\nstate running\nmemberships 0\ncomes-within-ms 0\n",
        "cadre-recovery 1\nstate gone\nmemberships 0\ncomes-within-ms 0\n",
        "cadre-recovery 1\nstate running\nmemberships -1\ncomes-within-ms 0\n",
        "cadre-recovery 1\nstate running\nmemberships 0\ncomes-within-ms 99999999999999\n",
        "cadre-recovery 1\nstate running\nmemberships 0\ncomes-within-ms 1 \n"}) {
    EXPECT_EQ(parse_recovery_file(other), std::nullopt) << other;
  }
}

}  // namespace
}  // namespace cadre
