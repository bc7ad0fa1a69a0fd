// An error keeps what programs read of it on its way through the layers.
#include "cadre/base/error.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace cadre
