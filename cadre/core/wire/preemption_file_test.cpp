#include "cadre/core/wire/preemption_file.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace cadre {
namespace {

TEST(PreemptionFileFormat, IsTheDocumentedOne) {
  EXPECT_EQ(encode_preemption_file({}), "cadre-preemption 1\nasked\n");
  const PreemptionFile saved{.saved_step = 42, .exit_code = 75};
  EXPECT_EQ(encode_preemption_file(saved), "cadre-preemption 1\nsaved-step 42\nexit-code 75\n");
}

TEST(PreemptionFileFormat, IsReadAsItWasWritten) {
  for (const PreemptionFile& file :
       {PreemptionFile{}, PreemptionFile{.saved_step = 0, .exit_code = 1},
        PreemptionFile{.saved_step = std::numeric_limits<int64_t>::max(), .exit_code = 255}}) {
    const std::string text = encode_preemption_file(file);
    EXPECT_LE(text.size(), kMaxPreemptionFileBytes);
    EXPECT_EQ(parse_preemption_file(text), file) << text;
  }
}

TEST(PreemptionFileFormat, AnythingElseIsNoSuchFile) {
  const std::string text = encode_preemption_file({.saved_step = 42, .exit_code = 75});
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_EQ(parse_preemption_file(text.substr(0, size)), std::nullopt) << size;
  }
  EXPECT_EQ(parse_preemption_file(text + "x"), std::nullopt);
  for (const char* other :
       {"cadre-preemption 2\nasked\n", "cadre-preemption 1\nsaved-step x\nexit-code 75\n",
        "cadre-preemption 1\nsaved-step 42\nexit-code 0\n",
        "cadre-preemption 1\nsaved-step 42\nexit-code 256\n",
        "cadre-preemption 1\nsaved-step 99999999999999999999\nexit-code 75\n",
        "cadre-preemption 1\nsaved-step 42 \nexit-code 75\n"}) {
    EXPECT_EQ(parse_preemption_file(other), std::nullopt) << other;
  }
}

}  // namespace
}  // namespace cadre
