#include "cadre/core/os/proc/pipe.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <utility>

namespace cadre::os {
namespace {

TEST(Pipe, AReaderGetsWhatIsThereAndThenTheEnd) {
  Pipe pipe = make_pipe().value_or_throw();
  PipeReader reader(std::move(pipe.read_end));
  std::array<std::byte, 4> buffer{};
  PipeReader::Chunk chunk = reader.try_read(buffer);
  EXPECT_EQ(chunk.num_bytes, 0U);
  EXPECT_FALSE(chunk.has_ended);
  ASSERT_EQ(::write(pipe.write_end.get(), "abcdef", 6), 6);
  pipe.write_end.close();
  chunk = reader.try_read(buffer);
  EXPECT_EQ(chunk.num_bytes, 4U);
  EXPECT_EQ(buffer[3], std::byte{'d'});
  EXPECT_FALSE(chunk.has_ended);
  EXPECT_EQ(reader.try_read(buffer).num_bytes, 2U);
  EXPECT_TRUE(reader.try_read(buffer).has_ended);
}

TEST(Pipe, BothEndsAreClosedOnExecAndOnlyTheReaderNeverBlocks) {
  const Pipe pipe = make_pipe().value_or_throw();
  for (const Fd* end : {&pipe.read_end, &pipe.write_end}) {
    EXPECT_EQ(::fcntl(end->get(), F_GETFD), FD_CLOEXEC);
  }
  EXPECT_NE(::fcntl(pipe.read_end.get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_EQ(::fcntl(pipe.write_end.get(), F_GETFL) & O_NONBLOCK, 0);
}

}  // namespace
}  // namespace cadre::os
