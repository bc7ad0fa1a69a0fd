// Tests that an error keeps the fields that programs read while it passes through the layers.
#include "cadre/core/base/error.h"

#include <gtest/gtest.h>

#include <memory>
#include <string_view>
#include <vector>

namespace cadre {
namespace {

Error lost_rank() {
  return Error(ErrorCode::kPeerLost, "rank 3 is gone")
      .with_details(
          {.culprit = 3, .reporter = 1, .operation = "all_reduce", .operation_number = 42});
}

TEST(ErrorDetails, ContextStandsBeforeTheMessageAndKeepsTheRest) {
  const Error error = lost_rank().with_context("connecting");
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.message(), "connecting: rank 3 is gone");
  EXPECT_EQ(error.details().culprit, 3);
  EXPECT_EQ(error.details().reporter, 1);
  EXPECT_EQ(error.details().operation, "all_reduce");
  EXPECT_EQ(error.details().operation_number, 42U);
}

TEST(ErrorDetails, ACulpritOrReporterThatIsKnownStays) {
  const Error known = lost_rank().with_culprit(5).with_reporter(6);
  EXPECT_EQ(known.details().culprit, 3);
  EXPECT_EQ(known.details().reporter, 1);
  const Error open = Error(ErrorCode::kTimeout, "late").with_culprit(5).with_reporter(6);
  EXPECT_EQ(open.details().culprit, 5);
  EXPECT_EQ(open.details().reporter, 6);
  EXPECT_TRUE(open.details().operation.empty());
  EXPECT_FALSE(open.details().operation_number);
}

TEST(ErrorDetails, AnExceptionCarriesThem) {
  try {
    Result<int>(lost_rank()).value_or_throw();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.details().culprit, 3);
  }
}

Result<int> half_of(int number) {
  if (number % 2 == 0) return number / 2;
  return Error(ErrorCode::kInvalidArgument, "odd");
}

Status require_half(int number) {
  CADRE_RETURN_IF_ERROR(half_of(number));
  return {};
}

TEST(Error, CodesHaveTheirNames) {
  // The store's protocol sends each code as its number (docs/formats/store-tcp.md). A main() that
  // returns a code must not return 0.
  const std::vector<std::string_view> names = {"kInvalidArgument", "kTimeout",     "kPeerLost",
                                               "kAborted",         "kUnavailable", "kCorruption",
                                               "kInternal"};
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(to_string(static_cast<ErrorCode>(i + 1)), names[i]);
  }
  EXPECT_EQ(to_string(static_cast<ErrorCode>(0)), "unknown code");
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
