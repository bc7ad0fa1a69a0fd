// Tests programs that close descriptors of Cadre and open a file that gets their numbers. The file
// must not change, and the next use of the number must return an error that explains what has
// happened.
#include "cadre/core/os/io/fd.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/os/files/locked_file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/core/os/files/scratch_memory.h"
#include "cadre/core/os/io/poll_set.h"
#include "cadre/core/os/native/segment.h"
#include "cadre/core/os/process_watcher.h"
#include "cadre/core/os/system.h"
#include "cadre/testing/core/program_file.h"
#include "cadre/testing/core/ranks.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr size_t kPages = 65536;

class ClosedFromOutside : public ::testing::Test {
 protected:
  // Opens the program's file under the numbers of all descriptors that were opened since the
  // fixture was made.
  void steal() {
    stolen_ = testing::opened_since(before_);
    ASSERT_FALSE(stolen_.empty());
    for (const int number : stolen_) file_.take_number(number);
  }
  // Expects that no byte was written to the program's file and that its descriptors are open.
  void expect_intact() {
    EXPECT_TRUE(file_.is_intact());
    for (const int number : stolen_) {
      EXPECT_TRUE(testing::ProgramFile::is_open(number)) << number;
      testing::close_from_outside(number);
    }
  }
  static void expect_refused(const Status& status, std::string_view begin) {
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code(), ErrorCode::kInvalidArgument);
    EXPECT_TRUE(status.error().details().is_own_limit);
    EXPECT_THAT(status.error().message(), StartsWith(std::string(begin) + ": file descriptor "));
    EXPECT_THAT(status.error().message(), HasSubstr(" was closed by other code of this process"));
  }
  template <typename T>
  static void expect_refused(const Result<T>& result, std::string_view begin) {
    expect_refused(result.ok() ? Status() : Status(result.error()), begin);
  }

  testing::TemporaryFolder folder_;
  testing::ProgramFile file_{folder_.file("precious")};
  std::unique_ptr<System> system_ = make_native_system();
  std::set<int> before_ = testing::open_descriptors();
  std::set<int> stolen_;
};

TEST_F(ClosedFromOutside, ADescriptorClosesOnlyWhatIsItsOwn) {
  {
    const Fd fd(::eventfd(0, EFD_CLOEXEC));
    EXPECT_TRUE(fd.is_own());
    EXPECT_TRUE(fd.check("use it").ok());
    steal();
    EXPECT_FALSE(fd.is_own());
    expect_refused(fd.check("use it"), "use it");
  }
  expect_intact();
}

// An Fd must not take an eventfd, epoll or timerfd of the program for its own, although all
// descriptors of such a kind have the same inode.
TEST_F(ClosedFromOutside, ADescriptorOfTheSameKindIsNotItsOwn) {
  const std::vector<std::function<int()>> kinds = {
      [] { return ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); },
      [] { return ::epoll_create1(EPOLL_CLOEXEC); },
      [] { return ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC); }};
  for (const auto& make : kinds) {
    int number = -1;
    {
      const Fd fd(make());
      number = fd.get();
      EXPECT_TRUE(fd.is_own());
      testing::close_from_outside(number);
      ASSERT_EQ(make(), number) << "the lowest free number";
      EXPECT_FALSE(fd.is_own());
      testing::close_from_outside(number);
      const Fd next(make());
      ASSERT_EQ(next.get(), number);
      EXPECT_TRUE(next.is_own());
      EXPECT_FALSE(fd.is_own()) << "another one of the library";
      testing::close_from_outside(number);
      ASSERT_EQ(make(), number);
    }
    EXPECT_GE(::fcntl(number, F_GETFD), 0) << "that of the program stays open";
    ::close(number);
  }
}

// The moved Fd must still recognize its descriptor as its own: it refers to the same open file. The
// mark must not switch on signals (O_ASYNC).
TEST_F(ClosedFromOutside, AMarkMovesWithTheDescriptor) {
  Fd fd(::eventfd(0, EFD_CLOEXEC));
  const Fd moved = std::move(fd);
  EXPECT_TRUE(moved.is_own());
  EXPECT_EQ(::fcntl(moved.get(), F_GETFL) & O_ASYNC, 0);
}

TEST_F(ClosedFromOutside, AClosedNumberIsNotItsOwn) {
  const Fd fd(::eventfd(0, EFD_CLOEXEC));
  testing::close_from_outside(fd.get());
  EXPECT_FALSE(fd.is_own());
  EXPECT_FALSE(Fd().is_own());
}

TEST_F(ClosedFromOutside, AnEventWritesNothing) {
  {
    const auto event = system_->make_event();
    steal();
    event->notify();
    event->clear();
  }
  expect_intact();
}

// The poll began before the descriptor was closed, so only the regular check of descriptors
// (kHandleLook) can end the poll.
TEST_F(ClosedFromOutside, APollOfAnEventEnds) {
  const auto event = system_->make_event();
  const int number = event->poll_handle();
  bool is_ready = false;
  const auto waiting = system_->spawn("waiting", [&] {
    PollItem item{.target = event.get(), .want_read = true};
    is_ready =
        system_->poll(std::span(&item, 1), system_->deadline_in(seconds(30))) && item.can_read;
  });
  system_->make_waiter()->park(system_->deadline_in(std::chrono::milliseconds(50)));
  const TimePoint start = system_->now();
  testing::close_from_outside(number);
  waiting->join();
  EXPECT_TRUE(is_ready);
  EXPECT_LT(system_->now() - start, seconds(15));
}

TEST_F(ClosedFromOutside, APollSetReportsWhatItHasLost) {
  for (const bool loses_epoll : {false, true}) {
    const std::set<int> earlier = testing::open_descriptors();
    const auto event = system_->make_event();
    PollSet set(*system_);
    set.watch(7, {.target = event.get(), .want_read = true});
    const std::set<int> numbers = testing::opened_since(earlier);
    ASSERT_EQ(numbers.size(), 2u);
    for (const int number : numbers) {
      if (loses_epoll || number == event->poll_handle()) testing::close_from_outside(number);
    }
    const auto ready = set.wait(system_->deadline_in(seconds(30)));
    ASSERT_EQ(ready.size(), 1u);
    EXPECT_EQ(ready[0].key, 7u);
    EXPECT_TRUE(ready[0].can_read);
    set.watch(7, {.target = event.get(), .want_write = true});
    set.forget(7);
  }
}

TEST_F(ClosedFromOutside, ASegmentKeepsItsMemoryAndTouchesNoFile) {
  {
    SegmentTable table;
    const auto segment = table.create(4 * kPages).value_or_throw();
    ASSERT_TRUE(reserve_pages(*segment, 0, kPages).ok());
    segment->bytes()[0] = std::byte{7};
    auto& pages = dynamic_cast<SharedPages&>(*segment);
    steal();
    expect_refused(pages.reserve(kPages, kPages), "reserve shared memory");
    expect_refused(pages.release(0, kPages), "give back shared memory");
    expect_refused(pages.make_private(0, kPages), "make shared memory private");
    const std::array<size_t, 2> begins = {0, kPages};
    expect_refused(pages.map_ranges(begins, kPages), "map ranges of shared memory");
    EXPECT_EQ(segment->bytes()[0], std::byte{7});
  }
  expect_intact();
}

TEST_F(ClosedFromOutside, AConnectionSaysNothingToAStranger) {
  {
    const auto listener = system_->listen({Address::Kind::kTcp, "127.0.0.1", 0}).value_or_throw();
    const Deadline soon = system_->deadline_in(seconds(20));
    const auto socket = system_->connect(listener->address(), soon).value_or_throw();
    steal();
    std::array<std::byte, 8> bytes{};
    const std::string what = "connection from " + socket->local_address().to_string() + " to " +
                             socket->peer_address().to_string();
    expect_refused(socket->try_send(bytes), what);
    expect_refused(socket->try_recv(bytes), what);
    expect_refused(listener->try_accept(), "accept on " + listener->address().to_string());
    socket->shutdown();
  }
  expect_intact();
}

TEST_F(ClosedFromOutside, ScratchMemoryTouchesNoOtherFile) {
  {
    const auto arena = ScratchArena::create(folder_.path()).value_or_throw();
    const ScratchMemory memory = arena->allocate(kPages).value_or_throw();
    memory.bytes()[0] = std::byte{7};
    steal();
    const std::string what = "use a scratch file in " + folder_.path().string();
    expect_refused(arena->reserve(kPages), what);
    expect_refused(arena->allocate(kPages), what);
    EXPECT_EQ(memory.bytes()[0], std::byte{7});
  }
  expect_intact();
}

TEST_F(ClosedFromOutside, FilesThatAreWrittenLaterTouchNoOtherFile) {
  {
    const std::string path = folder_.file("own");
    LockedFile locked = LockedFile::open(path).value_or_throw();
    NativeFileSystem files;
    const auto output = files.create(folder_.file("output")).value_or_throw();
    steal();
    std::array<std::byte, 8> bytes{};
    expect_refused(locked.append_at(0, bytes), "use " + path);
    expect_refused(locked.truncate(1), "use " + path);
    expect_refused(locked.read_at(0, bytes), "use " + path);
    expect_refused(locked.try_lock(), "use " + path);
    locked.unlock();
    expect_refused(output->write(bytes), "write " + folder_.file("output"));
    expect_refused(output->sync(), "write " + folder_.file("output"));
  }
  expect_intact();
}

}  // namespace
}  // namespace cadre::os
