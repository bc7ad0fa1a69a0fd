#include "cadre/core/os/proc/fork/fork_request.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <string>

#include "cadre/core/os/proc/pipe.h"

namespace cadre::os {
namespace {

class ForkRequestTest : public ::testing::Test {
 protected:
  ForkRequestTest() {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
      throw Error(ErrorCode::kUnavailable, "socketpair");
    }
    launcher_ = Fd(ends[0]);
    template_ = Fd(ends[1]);
  }

  Fd launcher_;
  Fd template_;
};

TEST_F(ForkRequestTest, ArrivesWhole) {
  const Pipe output = make_pipe().value_or_throw();
  const ForkRequest sent{.launcher_pid = 4711,
                         .ignored_signals = {SIGHUP, SIGXFSZ},
                         .soft_limits = {.descriptors = 1024},
                         .cores = {0, 130},
                         .environment = {"RANK=3", "EMPTY=", "EQUALS=a=b", "PATH=/bin"}};
  const int end = output.write_end.get();
  ASSERT_TRUE(send_fork_request(launcher_.get(), sent, end, end).ok());
  const auto received = receive_fork_request(template_.get());
  ASSERT_TRUE(received.ok()) << received.error().message();
  EXPECT_EQ(received->request.launcher_pid, 4711);
  EXPECT_EQ(received->request.ignored_signals, sent.ignored_signals);
  EXPECT_EQ(received->request.soft_limits.descriptors, 1024U);
  EXPECT_EQ(received->request.soft_limits.stack_bytes, std::nullopt);
  EXPECT_EQ(received->request.cores, sent.cores);
  EXPECT_EQ(received->request.environment, sent.environment);
  ASSERT_EQ(::write(received->output.get(), "a", 1), 1);
  ASSERT_EQ(::write(received->error.get(), "b", 1), 1);
  std::array<char, 4> bytes{};
  EXPECT_EQ(::read(output.read_end.get(), bytes.data(), bytes.size()), 2);
  EXPECT_EQ(std::string(bytes.data(), 2), "ab");
}

TEST_F(ForkRequestTest, ACoreThatCannotExistIsAnError) {
  const Pipe output = make_pipe().value_or_throw();
  const int end = output.write_end.get();
  for (const int core : {-1, 1 << 16, 0x7fffffff}) {
    const ForkRequest sent{.cores = {0, core}, .environment = {"RANK=3"}};
    ASSERT_TRUE(send_fork_request(launcher_.get(), sent, end, end).ok());
    EXPECT_FALSE(receive_fork_request(template_.get()).ok()) << core;
    std::array<char, 64> rest{};  // the texts
    EXPECT_EQ(::read(template_.get(), rest.data(), rest.size()), 7) << core;
  }
}

TEST_F(ForkRequestTest, AnEndedProcessIsAnError) {
  launcher_.close();
  EXPECT_EQ(receive_fork_request(template_.get()).error().code(), ErrorCode::kUnavailable);
  const ForkHello hello = make_fork_hello();
  EXPECT_FALSE(send_bytes(template_.get(), &hello, sizeof(hello)).ok());
}

TEST_F(ForkRequestTest, BytesWithoutDescriptorsAreAnError) {
  const std::string bytes(200, 'x');
  ASSERT_TRUE(send_bytes(launcher_.get(), bytes.data(), bytes.size()).ok());
  EXPECT_EQ(receive_fork_request(template_.get()).error().code(), ErrorCode::kUnavailable);
}

TEST(ForkHello, NamesItsBuild) {
  ForkHello hello = make_fork_hello();
  EXPECT_TRUE(is_of_this_build(hello));
  hello.build[0] ^= 1;
  EXPECT_FALSE(is_of_this_build(hello));
}

}  // namespace
}  // namespace cadre::os
