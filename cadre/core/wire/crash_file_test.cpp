#include "cadre/core/wire/crash_file.h"

#include <gtest/gtest.h>

#include <string>

namespace cadre {
namespace {

constexpr const char* kMaps =
    "1000-2000 r--p 00000000 08:01 5   /bin/x\n"
    "2000-3000 r-xp 00001000 08:01 5   /bin/x\n"
    "3000-4000 rw-p 00000000 00:00 0 \n"
    "7000-8000 r-xp 00000000 08:01 6   /lib/a b.so\n";

std::string whole_file() {
  return std::string(kCrashFileBegin) +
         "signal 11\ncode 1\naddress 0x10\nprocess 7\nthread 8\ntime-ms 9\nmaps\n" + kMaps +
         "frames\nexact 0x2010\ncall 0x7020\nend\n";
}

TEST(CrashFile, IsParsed) {
  const CrashFile file = parse_crash_file(whole_file()).value_or_throw();
  EXPECT_EQ(file, (CrashFile{.signal = 11,
                             .code = 1,
                             .address = 16,
                             .process = 7,
                             .thread = 8,
                             .time_ms = 9,
                             .maps = kMaps,
                             .frames = {{.address = 0x2010, .is_exact = true}, {.address = 0x7020}},
                             .is_complete = true}));
}

// A process may die at any byte while it writes the file.
TEST(CrashFile, AnyBeginningOfAFileIsParsedOrRefused) {
  const std::string whole = whole_file();
  for (size_t size = 0; size < whole.size(); ++size) {
    const auto file = parse_crash_file(std::string_view(whole).substr(0, size));
    EXPECT_EQ(file.ok(), size >= kCrashFileBegin.size()) << size;
    EXPECT_FALSE(file.ok() && file->is_complete) << size;
  }
}

TEST(CrashFile, InvalidLinesAreRefusedByNumber) {
  const auto reason = [](const std::string& lines) {
    return parse_crash_file(std::string(kCrashFileBegin) + lines).error().message();
  };
  EXPECT_EQ(reason("signal 11\ncode x\n"), "line 3 of the crash file is invalid: \"code x\"");
  EXPECT_EQ(reason("address 16\n"), "line 2 of the crash file is invalid: \"address 16\"");
  EXPECT_EQ(reason("maps\nframes\ncall\n"), "line 4 of the crash file is invalid: \"call\"");
  EXPECT_EQ(reason("odd\n"), "line 2 of the crash file is invalid: \"odd\"");
  std::string many = "maps\nframes\n";
  for (size_t i = 0; i < kMaxCrashFrames + 2; ++i) many += "call 0x1\n";
  EXPECT_NE(reason(many), "");
}

TEST(CrashFile, AnAddressBelongsToAFile) {
  const auto code = find_mapped_code(kMaps, 0x2010);
  ASSERT_TRUE(code);
  EXPECT_EQ(code->path, "/bin/x");
  EXPECT_EQ(code->offset, 0x1010U);
  EXPECT_EQ(find_mapped_code(kMaps, 0x7fff)->path, "/lib/a b.so");
  EXPECT_FALSE(find_mapped_code(kMaps, 0x3500));  // anonymous memory
  EXPECT_FALSE(find_mapped_code(kMaps, 0x8000));
  EXPECT_FALSE(find_mapped_code("odd\n-\n1-zz \n", 1));
}

}  // namespace
}  // namespace cadre
