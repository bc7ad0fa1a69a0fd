#include "cadre/core/comm/recovery/recovery.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/core/wire/recovery/recovery_files.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;

// Sets the variable that a launcher sets; the destructor restores it.
class RecoveryTest : public ::testing::Test {
 protected:
  RecoveryTest() {
    if (const char* const value = std::getenv(kRecoveryVariable)) before_ = value;
    ::setenv(kRecoveryVariable, path_.c_str(), 1);
  }
  ~RecoveryTest() override {
    if (before_) {
      ::setenv(kRecoveryVariable, before_->c_str(), 1);
    } else {
      ::unsetenv(kRecoveryVariable);
    }
  }

  std::optional<RecoveryFile> written() const {
    std::ifstream file(path_);
    return parse_recovery_file(std::string(std::istreambuf_iterator<char>(file), {}));
  }
  void give(uint64_t number, int rank) const {
    MembershipFile file{.number = number, .variables = {}};
    for (const std::string_view name : kMembershipVariables) {
      file.variables.emplace_back(name, name == "RANK" ? std::to_string(rank) : "5");
    }
    for (auto& [name, value] : file.variables) {
      if (name == "MASTER_ADDR") value = "127.0.0.1";
      if (name == "LOCAL_RANK") value = "0";
    }
    std::ofstream(path_ + std::string(kMembershipFileSuffix)) << encode_membership_file(file);
  }
  ErrorCode error_of_wait(Recovery& recovery) {
    try {
      recovery.wait_for_membership(system_->deadline_in(std::chrono::milliseconds(30)));
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  }

  const std::unique_ptr<os::System> system_ = os::make_native_system();
  const testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("rank.recovery");
  std::optional<std::string> before_;
};

TEST_F(RecoveryTest, WithoutALauncherItCannotWait) {
  ::unsetenv(kRecoveryVariable);
  Recovery recovery(*system_);
  EXPECT_FALSE(recovery.is_available());
  EXPECT_FALSE(recovery.can_recover(Error(ErrorCode::kPeerLost, "")));
  EXPECT_EQ(error_of_wait(recovery), ErrorCode::kUnavailable);
}

TEST_F(RecoveryTest, RefusesAnImpossibleTime) {
  EXPECT_THROW(Recovery(*system_, {.comes_within = Duration{}}), Error);
  EXPECT_THROW(Recovery(*system_, {.comes_within = std::chrono::seconds(-1)}), Error);
}

TEST_F(RecoveryTest, OnlyTheFailureOfAGroupCanBeRecoveredFrom) {
  Recovery recovery(*system_);
  for (const ErrorCode code : {ErrorCode::kPeerLost, ErrorCode::kTimeout, ErrorCode::kAborted}) {
    EXPECT_TRUE(recovery.can_recover(Error(code, "")));
  }
  for (const ErrorCode code : {ErrorCode::kInvalidArgument, ErrorCode::kUnavailable,
                               ErrorCode::kCorruption, ErrorCode::kInternal}) {
    EXPECT_FALSE(recovery.can_recover(Error(code, "")));
  }
}

TEST_F(RecoveryTest, TellsTheLauncherWhetherTheRankCanWait) {
  {
    Recovery recovery(*system_, {.comes_within = std::chrono::seconds(7)});
    EXPECT_EQ(written(), (RecoveryFile{.comes_within = std::chrono::seconds(7)}));
  }
  EXPECT_EQ(written(), RecoveryFile{});
}

TEST_F(RecoveryTest, AWaitThatHasEndedCountsAsRunning) {
  Recovery recovery(*system_, {.comes_within = std::chrono::seconds(7)});
  EXPECT_EQ(error_of_wait(recovery), ErrorCode::kTimeout);
  EXPECT_EQ(written(), (RecoveryFile{.comes_within = std::chrono::seconds(7)}));
}

TEST_F(RecoveryTest, EachWaitReturnsTheNextMembership) {
  Recovery recovery(*system_);
  give(1, 3);
  const JobPosition position =
      recovery.wait_for_membership(system_->deadline_in(std::chrono::seconds(10)));
  EXPECT_EQ(position, (JobPosition{.rank = 3, .world_size = 5, .restart_count = 5}));
  EXPECT_EQ(recovery.num_memberships(), 1U);
  EXPECT_EQ(error_of_wait(recovery), ErrorCode::kTimeout);  // number 1 is not the next one
  give(2, 4);
  EXPECT_EQ(recovery.wait_for_membership(system_->deadline_in(std::chrono::seconds(10))).rank, 4);
  EXPECT_EQ(read_job_environment().value_or_throw().rank, 4);
  // A Recovery that is made later begins with the present membership.
  Recovery later(*system_);
  EXPECT_EQ(later.num_memberships(), 2U);
  EXPECT_EQ(error_of_wait(later), ErrorCode::kTimeout);
}

TEST_F(RecoveryTest, AFileThatCannotBeWrittenIsAnError) {
  ::setenv(kRecoveryVariable, folder_.file("no/such/folder").c_str(), 1);
  try {
    Recovery recovery(*system_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(error.message(), HasSubstr("the launcher does not learn of this rank"));
  }
}

}  // namespace
}  // namespace cadre
