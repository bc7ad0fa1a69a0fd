// Which of several exits is the first failure, in virtual time.
#include "cadre/launch/first_failure.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "cadre/testing/forwarding_system.h"

namespace cadre::launch {
namespace {

class StoppedClock final : public testing::ForwardingSystem {
 public:
  using ForwardingSystem::ForwardingSystem;
  TimePoint now() override { return now_; }
  void advance(Duration time) { now_ = now_ + time; }

 private:
  TimePoint now_{1'000'000'000};
};

class FirstFailureTest : public ::testing::Test {
 protected:
  void end(int rank, int code, bool was_asked_to_stop = false) {
    exits_.push_back(
        {.rank = rank, .status = {.code = code}, .was_asked_to_stop = was_asked_to_stop});
  }
  // The rank of the failure; -1 for none.
  int found() {
    const auto failure = first_.find(exits_);
    return failure ? failure->rank.value : -1;
  }
  bool is_known() { return first_.is_known(exits_); }

  const std::unique_ptr<os::System> native_ = os::make_native_system();
  StoppedClock clock_{*native_};
  std::map<int, int> names_;  // by the rank that names
  int num_questions_ = 0;
  FirstFailure first_{clock_, [this](Rank rank) -> std::optional<Rank> {
                        ++num_questions_;
                        const auto named = names_.find(rank.value);
                        if (named == names_.end()) return std::nullopt;
                        return Rank(named->second);
                      }};
  std::vector<WorkerExit> exits_;
};

TEST_F(FirstFailureTest, SuccessAndRequestedEndsAreNone) {
  end(0, 0);
  end(1, 1, /*was_asked_to_stop=*/true);
  EXPECT_EQ(found(), -1);
  EXPECT_FALSE(is_known());
}

TEST_F(FirstFailureTest, AWorkerThatNamesNoOtherIsItAtOnce) {
  names_ = {{1, 1}};
  end(1, 3);
  EXPECT_TRUE(is_known());
  EXPECT_EQ(found(), 1);
}

TEST_F(FirstFailureTest, TheNamedWorkerIsWaitedForAndIsIt) {
  names_ = {{0, 2}, {1, 2}};
  end(0, 1);
  EXPECT_FALSE(is_known());
  ASSERT_TRUE(first_.due().has_value());
  clock_.advance(FirstFailure::kWindow / 2);
  end(1, 1);
  EXPECT_FALSE(is_known());
  end(2, 7);
  EXPECT_TRUE(is_known());
  EXPECT_EQ(found(), 2);
  EXPECT_EQ(num_questions_, 2) << "each worker on the way is asked about once";
}

TEST_F(FirstFailureTest, AChainOfNamesLeadsToItsEnd) {
  names_ = {{0, 1}, {1, 2}};
  end(0, 1);
  end(1, 1);
  EXPECT_FALSE(is_known());
  end(2, 1);
  EXPECT_TRUE(is_known());
  EXPECT_EQ(found(), 2);
}

TEST_F(FirstFailureTest, ANamedWorkerThatDoesNotFailChangesNothing) {
  names_ = {{0, 1}};
  end(0, 1);
  EXPECT_FALSE(is_known());
  clock_.advance(FirstFailure::kWindow);
  EXPECT_TRUE(is_known());
  end(1, 15, /*was_asked_to_stop=*/true);
  EXPECT_EQ(found(), 0);
}

TEST_F(FirstFailureTest, OfWorkersThatNameEachOtherTheFirstIsIt) {
  names_ = {{0, 1}, {1, 0}};
  end(1, 1);
  end(0, 1);
  EXPECT_TRUE(is_known());
  EXPECT_EQ(found(), 1);
}

}  // namespace
}  // namespace cadre::launch
