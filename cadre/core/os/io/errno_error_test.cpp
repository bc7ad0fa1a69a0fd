#include "cadre/core/os/io/errno_error.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace cadre::os {
namespace {

TEST(ErrnoError, NamesTheActionAndTheReason) {
  const Error error =
      errno_error(ErrorCode::kUnavailable, "connect to tcp:127.0.0.1:1", ECONNREFUSED);
  EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
  EXPECT_EQ(error.message(), "connect to tcp:127.0.0.1:1: Connection refused (errno 111)");
}

}  // namespace
}  // namespace cadre::os
