#include "cadre/base/error.h"

#include <gtest/gtest.h>

#include <memory>

namespace cadre {
namespace {

Result<int> half_of(int number) {
  if (number % 2 == 0) return number / 2;
  return Error(ErrorCode::kInvalidArgument, "odd");
}

Status require_half(int number) {
  CADRE_RETURN_IF_ERROR(half_of(number));
  return {};
}

TEST(Error, CodesHaveTheirNames) {
  // In the order in which they travel in messages (docs/formats/store-native.md).
  const std::vector<std::string_view> names = {"kInvalidArgument", "kTimeout",     "kPeerLost",
                                               "kAborted",         "kUnavailable", "kCorruption",
                                               "kInternal"};
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(to_string(static_cast<ErrorCode>(i)), names[i]);
  }
}

TEST(Error, ContextComesBeforeTheMessageAndKeepsTheCode) {
  const Error error(ErrorCode::kTimeout, "too late");
  const Error explained = error.with_context("rank 3");
  EXPECT_EQ(explained.code(), ErrorCode::kTimeout);
  EXPECT_EQ(explained.message(), "rank 3: too late");
  EXPECT_STREQ(explained.what(), "rank 3: too late");
  EXPECT_EQ(error, Error(ErrorCode::kTimeout, "too late"));
  EXPECT_FALSE(error == Error(ErrorCode::kPeerLost, "too late"));
  EXPECT_FALSE(error == explained);
}

TEST(Result, HoldsAValueOrAnError) {
  EXPECT_TRUE(half_of(4).ok());
  EXPECT_EQ(*half_of(4), 2);
  EXPECT_EQ(half_of(4).value_or_throw(), 2);
  EXPECT_FALSE(half_of(5).ok());
  EXPECT_EQ(half_of(5).error().message(), "odd");
  EXPECT_THROW((void)half_of(5).value_or_throw(), Error);
}

TEST(Result, GivesAwayWhatCannotBeCopied) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(7));
  const std::unique_ptr<int> taken = std::move(result).value_or_throw();
  EXPECT_EQ(*taken, 7);
}

TEST(Status, IsAnErrorOrNothing) {
  EXPECT_TRUE(require_half(2).ok());
  EXPECT_EQ(require_half(3).error().code(), ErrorCode::kInvalidArgument);
  EXPECT_NO_THROW(require_half(2).value_or_throw());
  EXPECT_THROW(require_half(3).value_or_throw(), Error);
}

}  // namespace
}  // namespace cadre
