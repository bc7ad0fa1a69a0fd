#include "cadre/core/os/native/segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>

#include "cadre/testing/core/leftovers.h"

namespace cadre::os {
namespace {

Fd duplicate(const SharedMemory& segment) {
  return Fd(::fcntl(dynamic_cast<const NativeSharedMemory&>(segment).fd(), F_DUPFD_CLOEXEC, 0));
}

TEST(SegmentTable, MapsAKnownSegmentOnce) {
  const testing::Resources before = testing::count_resources();
  {
    SegmentTable table;
    const auto first = table.create(5000).value_or_throw();
    const auto second = table.adopt(duplicate(*first)).value_or_throw();
    EXPECT_EQ(first->bytes().data(), second->bytes().data());
    SegmentTable other_system;
    const auto third = other_system.adopt(duplicate(*first)).value_or_throw();
    EXPECT_NE(first->bytes().data(), third->bytes().data());
    first->bytes()[4999] = std::byte{9};
    EXPECT_EQ(third->bytes()[4999], std::byte{9});
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

TEST(SegmentTable, NoHolderCanChangeTheSize) {
  SegmentTable table;
  const auto segment = table.create(8192).value_or_throw();
  const Fd fd = duplicate(*segment);
  EXPECT_NE(::ftruncate(fd.get(), 0), 0);
  EXPECT_NE(::ftruncate(fd.get(), 1 << 20), 0);
}

// Returns how many bytes of the file's pages are in memory.
int64_t num_allocated_bytes(const SharedMemory& segment) {
  struct stat info {};
  EXPECT_EQ(::fstat(dynamic_cast<const NativeSharedMemory&>(segment).fd(), &info), 0);
  return static_cast<int64_t>(info.st_blocks) * 512;
}

TEST(SharedPages, ReservedPagesAreAllocatedBeforeTheyAreTouched) {
  SegmentTable table;
  const auto segment = table.create(40 << 20).value_or_throw();
  EXPECT_EQ(num_allocated_bytes(*segment), 0);
  reserve_pages(*segment, 1 << 20, 20 << 20).value_or_throw();
  EXPECT_EQ(num_allocated_bytes(*segment), 20 << 20);
  segment->bytes()[1 << 20] = std::byte{7};
  reserve_pages(*segment, 0, 2 << 20).value_or_throw();
  EXPECT_EQ(segment->bytes()[1 << 20], std::byte{7});
  reserve_pages(*segment, 0, 0).value_or_throw();
}

// The kernel refuses to allocate beyond the end of a sealed segment, so reserve_pages() must return
// an error.
TEST(SharedPages, MemoryThatCannotBeReservedIsAnErrorThatSaysSo) {
  SegmentTable table;
  const auto segment = table.create(4096).value_or_throw();
  const Status status = reserve_pages(*segment, 0, 8192);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(status.error().message().find("reserve 8192 bytes of shared memory"),
            std::string_view::npos)
      << status.error().message();
}

TEST(SharedPages, PrivatePagesKeepTheirContentAndAreOutOfReach) {
  SegmentTable table;
  SegmentTable other_process;
  const auto mine = table.create(3 * 4096).value_or_throw();
  const auto theirs = other_process.adopt(duplicate(*mine)).value_or_throw();
  mine->bytes()[4096] = std::byte{1};
  mine->bytes()[8192] = std::byte{2};
  make_pages_private(*mine, 4096, 4096).value_or_throw();
  EXPECT_EQ(mine->bytes()[4096], std::byte{1});
  mine->bytes()[4097] = std::byte{3};
  theirs->bytes()[4097] = std::byte{4};
  EXPECT_EQ(mine->bytes()[4097], std::byte{3});
  // The page after the private one is still shared.
  theirs->bytes()[8192] = std::byte{5};
  EXPECT_EQ(mine->bytes()[8192], std::byte{5});
}

// Private pages must not show later writes of others: neither in parts that the owner has not
// written, nor in the same pages outside of the range that was made private.
TEST(SharedPages, WhatOthersWriteLaterDoesNotShowInPrivatePages) {
  SegmentTable table;
  SegmentTable other_process;
  const auto mine = table.create(4 * 4096).value_or_throw();
  const auto theirs = other_process.adopt(duplicate(*mine)).value_or_throw();
  theirs->bytes()[4096] = std::byte{1};
  make_pages_private(*mine, 4096 + 100, 4096).value_or_throw();
  for (const size_t at : {4096, 4096 + 100, 8191, 8192, 3 * 4096 - 1}) {
    const std::byte before = mine->bytes()[at];
    theirs->bytes()[at] = std::byte{6};
    EXPECT_EQ(mine->bytes()[at], before) << "byte " << at;
  }
  for (const size_t at : {4095, 3 * 4096}) {
    theirs->bytes()[at] = std::byte{7};
    EXPECT_EQ(mine->bytes()[at], std::byte{7}) << "byte " << at;
  }
}

TEST(SharedPages, ReleasedPagesTakeNoMemoryAndAreSharedAndZeroAgain) {
  SegmentTable table;
  SegmentTable other_process;
  const auto mine = table.create(4 * 4096).value_or_throw();
  const auto theirs = other_process.adopt(duplicate(*mine)).value_or_throw();
  reserve_pages(*mine, 0, 4 * 4096).value_or_throw();
  mine->bytes()[0] = std::byte{1};
  mine->bytes()[4096] = std::byte{2};
  mine->bytes()[2 * 4096] = std::byte{3};
  make_pages_private(*mine, 4096, 4096).value_or_throw();
  release_pages(*mine, 4096, 2 * 4096).value_or_throw();
  EXPECT_EQ(num_allocated_bytes(*mine), 2 * 4096);
  EXPECT_EQ(mine->bytes()[0], std::byte{1});
  EXPECT_EQ(mine->bytes()[4096], std::byte{0});
  EXPECT_EQ(theirs->bytes()[2 * 4096], std::byte{0});
  theirs->bytes()[4096 + 1] = std::byte{4};
  EXPECT_EQ(mine->bytes()[4096 + 1], std::byte{4});
}

TEST(SharedPages, RangesAreMappedInTheOrderThatWasAskedFor) {
  const testing::Resources before = testing::count_resources();
  {
    SegmentTable table;
    auto segment = table.create(5 * 4096).value_or_throw();
    segment->bytes()[4 * 4096] = std::byte{4};
    segment->bytes()[4096] = std::byte{1};
    const std::array<size_t, 2> begins = {4 * 4096, 4096};
    const auto view =
        dynamic_cast<SharedPages&>(*segment).map_ranges(begins, 4096).value_or_throw();
    ASSERT_EQ(view->bytes().size(), 2u * 4096);
    EXPECT_EQ(view->bytes()[0], std::byte{4});
    EXPECT_EQ(view->bytes()[4096], std::byte{1});
    segment.reset();
    view->bytes()[1] = std::byte{5};
    EXPECT_EQ(view->bytes()[1], std::byte{5});
  }
  EXPECT_EQ(testing::leftovers_since(before), "");
}

TEST(SegmentTable, RefusesADescriptorThatItsSenderCouldShrink) {
  SegmentTable table;
  Fd unsealed(::memfd_create("foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), 4096), 0);
  EXPECT_EQ(table.adopt(std::move(unsealed)).error().code(), ErrorCode::kCorruption);
  Fd no_memory(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_EQ(table.adopt(std::move(no_memory)).error().code(), ErrorCode::kCorruption);
}

}  // namespace
}  // namespace cadre::os
