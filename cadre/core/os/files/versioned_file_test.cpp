#include "cadre/core/os/files/versioned_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

#include "cadre/testing/core/temporary_folder.h"

namespace cadre::os {
namespace {

namespace fs = std::filesystem;

class VersionedFileTest : public ::testing::Test {
 protected:
  void write(const std::string& content) const {
    std::ofstream(path_, std::ios::binary) << content;
  }

  // Sets a later modification time, because the clocks of file systems are coarse.
  void touch() const {
    fs::last_write_time(path_, fs::last_write_time(path_) + std::chrono::seconds(1));
  }

  static std::string text_at(const VersionedFile& file, size_t offset, size_t count) {
    std::string text(count, '?');
    const Status status = file.read_at(offset, std::as_writable_bytes(std::span(text)));
    return status.ok() ? text : status.error().message();
  }

  testing::TemporaryFolder folder_;
  const std::string path_ = folder_.file("a");
};

TEST_F(VersionedFileTest, ReadsByPosition) {
  write("0123456789");
  const auto file = VersionedFile::open(path_);
  EXPECT_EQ(text_at(*file, 3, 4), "3456");
  EXPECT_EQ(text_at(*file, 10, 0), "");
  EXPECT_EQ(file->version().num_bytes, 10u);
  EXPECT_EQ(*file->current_version(), file->version());
}

TEST_F(VersionedFileTest, PiecesAreTheWholeFile) {
  for (const size_t num_bytes :
       {size_t{0}, size_t{5}, FilePieces::kPieceBytes, 2 * FilePieces::kPieceBytes + 3}) {
    std::string content(num_bytes, 'x');
    for (size_t i = 0; i < num_bytes; i += 1000)
      content[i] = static_cast<char>('a' + i / 1000 % 26);
    write(content);
    const auto file = VersionedFile::open(path_);
    FilePieces pieces(*file);
    std::string read;
    for (ConstBytes piece; !(piece = pieces.next().value_or_throw()).empty();) {
      read.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    EXPECT_TRUE(read == content) << num_bytes;
    EXPECT_TRUE(pieces.next()->empty()) << "again";
  }
}

TEST_F(VersionedFileTest, AFileThatIsCutShortIsAnErrorAndNoSignal) {
  write(std::string(20000, 'a'));
  const auto file = VersionedFile::open(path_);
  fs::resize_file(path_, 5);
  EXPECT_EQ(text_at(*file, 10000, 100),
            path_ +
                " was cut short: it had 20000 bytes when it was opened and ends at byte 10000 "
                "now");
  EXPECT_EQ(change_text(file->version(), *file->current_version()), "has 5 bytes instead of 20000");
}

TEST_F(VersionedFileTest, AWrittenFileHasAnotherVersion) {
  write("before");
  const auto file = VersionedFile::open(path_);
  touch();
  EXPECT_EQ(change_text(file->version(), *file->current_version()), "was written");
}

TEST_F(VersionedFileTest, AReplacedFileHasAnotherVersionAndTheOpenOneStays) {
  write("before");
  const auto file = VersionedFile::open(path_);
  fs::rename(path_, folder_.file("old"));
  write("behind");
  EXPECT_EQ(text_at(*file, 0, 6), "before");
  EXPECT_EQ(*file->current_version(), file->version());
  EXPECT_EQ(change_text(file->version(), VersionedFile::open(path_)->version()),
            "was replaced by another file");
}

TEST_F(VersionedFileTest, RefusesWhatIsNoFile) {
  EXPECT_THAT(VersionedFile::open(folder_.file("none")).error().message(),
              ::testing::HasSubstr("none: No such file"));
  EXPECT_FALSE(VersionedFile::open(folder_.path()).ok());
  EXPECT_THAT(VersionedFile::open("/dev/null").error().message(),
              ::testing::HasSubstr("expected a file"));
}

}  // namespace
}  // namespace cadre::os
