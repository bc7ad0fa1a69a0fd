#include "cadre/tensor/group/caught_error.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <functional>
#include <new>
#include <stdexcept>
#include <string>

namespace cadre::caught_error_test {
namespace {

Error caught(const std::function<void()>& thrower) {
  try {
    thrower();
  } catch (...) {
    return caught_error();
  }
  return {ErrorCode::kInternal, "nothing was thrown"};
}

TEST(CaughtError, KeepsAnErrorAsItIs) {
  const Error error = caught([] { throw Error(ErrorCode::kCorruption, "block 3"); });
  EXPECT_EQ(error.code(), ErrorCode::kCorruption);
  EXPECT_EQ(error.message(), "block 3");
}

TEST(CaughtError, NamesWhatTheProgramHasThrown) {
  const Error of_program = caught([] { throw std::runtime_error("no such file"); });
  EXPECT_EQ(of_program.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(of_program.message(), "no such file");
  const Error of_libtorch = caught([] { TORCH_CHECK(false, "sizes differ"); });
  EXPECT_EQ(of_libtorch.code(), ErrorCode::kInvalidArgument);
  EXPECT_TRUE(of_libtorch.message().starts_with("sizes differ")) << of_libtorch.message();
  EXPECT_EQ(of_libtorch.message().find("frame #"), std::string::npos) << "without the backtrace";
  const Error of_no_exception = caught([] { throw 3; });
  EXPECT_EQ(of_no_exception.code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(of_no_exception.message(), "an exception that is no std::exception");
}

TEST(CaughtError, MayBeTriedAgainWithoutMemory) {
  EXPECT_EQ(caught([] { throw std::bad_alloc(); }).code(), ErrorCode::kUnavailable);
}

}  // namespace
}  // namespace cadre::caught_error_test
