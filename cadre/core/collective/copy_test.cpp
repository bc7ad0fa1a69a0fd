#include "cadre/core/collective/copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace cadre {
namespace {

TEST(CopyTest, BothPoliciesCopyEveryByteAndNoOther) {
  std::vector<std::byte> from(1000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + 1);
  for (StorePolicy stores : {StorePolicy::kCached, StorePolicy::kStreaming}) {
    for (size_t offset = 0; offset < 70; offset += 3) {
      for (size_t count : {0, 1, 63, 64, 65, 128, 500}) {
        std::vector<std::byte> to(1000);
        std::vector<std::byte> expected(1000);
        std::memcpy(expected.data() + offset, from.data() + 5, count);
        copy(to.data() + offset, from.data() + 5, count, stores);
        ASSERT_EQ(to, expected) << offset << " " << count;
      }
    }
  }
}

}  // namespace
}  // namespace cadre
