// Tests the properties of every FileSystem, and the content of durable files after a failure or a
// loss of power.
#include "cadre/core/sim/simulated_disk.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/os/files/durable_file.h"
#include "cadre/core/os/files/native_file_system.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre::sim {
namespace {

using Names = std::vector<std::string>;

ConstBytes bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

Status write_text(os::FileSystem& files, const std::string& path, std::string_view text) {
  const ConstBytes piece = bytes_of(text);
  return os::write_file(files, path, {&piece, 1});
}

// Returns the content of the file, or "(none)" if it does not exist.
std::string content_of(os::FileSystem& files, const std::string& path) {
  const auto content = files.read(path, 1 << 20);
  return content.ok() ? *content : "(none)";
}

enum class Kind { kNative, kSimulated };

class FileSystemConformance : public ::testing::TestWithParam<Kind> {
 protected:
  FileSystemConformance() {
    if (GetParam() == Kind::kNative) {
      files_ = std::make_unique<os::NativeFileSystem>();
      folder_ = temporary_.path();
    } else {
      files_ = std::make_unique<SimulatedDisk>();
      folder_ = "/run";
      files_->make_folder(folder_).value_or_throw();
    }
  }
  std::string at(const std::string& name) const { return folder_ + "/" + name; }

  testing::TemporaryFolder temporary_;
  std::unique_ptr<os::FileSystem> files_;
  std::string folder_;
};

INSTANTIATE_TEST_SUITE_P(FileSystems, FileSystemConformance,
                         ::testing::Values(Kind::kNative, Kind::kSimulated), [](const auto& kind) {
                           return kind.param == Kind::kNative ? "Native" : "Simulated";
                         });

TEST_P(FileSystemConformance, AFileIsWrittenReadListedAndRemoved) {
  ASSERT_TRUE(write_text(*files_, at("b"), "second").ok());
  ASSERT_TRUE(write_text(*files_, at("a"), "first").ok());
  ASSERT_TRUE(write_text(*files_, at("a"), "1").ok());  // replaces a longer content
  EXPECT_EQ(content_of(*files_, at("a")), "1");
  EXPECT_EQ(files_->read(at("b"), 5).error().code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(files_->read(at("b"), 6).value_or_throw(), "second");
  EXPECT_EQ(files_->list(folder_).value_or_throw(), (Names{"a", "b"}));
  EXPECT_TRUE(files_->remove(at("a")).ok());
  EXPECT_EQ(files_->list(folder_).value_or_throw(), Names{"b"});
}

TEST_P(FileSystemConformance, WhatIsNotThereIsUnavailable) {
  const auto code = [](const Status& status) { return status.error().code(); };
  EXPECT_EQ(files_->read(at("none"), 9).error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(files_->list(at("none")).error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(files_->create(at("none/file")).error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(files_->create_beside(at("none/file")).error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(files_->open_shared(at("none/file")).error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(code(files_->remove(at("none"))), ErrorCode::kUnavailable);
  EXPECT_EQ(code(files_->sync(at("none"))), ErrorCode::kUnavailable);
  EXPECT_EQ(code(files_->rename(at("none"), at("a"))), ErrorCode::kUnavailable);
  EXPECT_EQ(code(files_->exchange(at("none"), at("a"))), ErrorCode::kUnavailable);
  EXPECT_EQ(code(files_->make_folder(folder_)), ErrorCode::kUnavailable);
}

TEST_P(FileSystemConformance, FilesAndFoldersAreRenamedAndExchanged) {
  for (const std::string name : {"x", "y"}) {
    ASSERT_TRUE(files_->make_folder(at(name)).ok());
    ASSERT_TRUE(write_text(*files_, at(name + "/file"), name).ok());
  }
  EXPECT_FALSE(files_->rename(at("x"), at("y")).ok()) << "a folder with content was replaced";
  ASSERT_TRUE(files_->exchange(at("x"), at("y")).ok());
  EXPECT_EQ(content_of(*files_, at("x/file")), "y");
  ASSERT_TRUE(files_->rename(at("x"), at("z")).ok());
  EXPECT_EQ(content_of(*files_, at("z/file")), "y");
  ASSERT_TRUE(files_->rename(at("z/file"), at("y/file")).ok());
  EXPECT_EQ(content_of(*files_, at("y/file")), "y");
  EXPECT_EQ(files_->list(at("z")).value_or_throw(), Names{});
}

TEST_P(FileSystemConformance, KindsAreThoseOfWhatWasMade) {
  using os::FileKind;
  ASSERT_TRUE(files_->make_folder(at("folder")).ok());
  ASSERT_TRUE(write_text(*files_, at("file"), "x").ok());
  EXPECT_EQ(files_->kind_of(at("folder")).value_or_throw(), FileKind::kFolder);
  EXPECT_EQ(files_->kind_of(at("file")).value_or_throw(), FileKind::kFile);
  EXPECT_EQ(files_->kind_of(at("none")).value_or_throw(), std::nullopt);
  EXPECT_EQ(files_->kind_of(at("none/file")).value_or_throw(), std::nullopt);
  EXPECT_EQ(files_->kind_of(at("file/below")).value_or_throw(), std::nullopt);
}

TEST_P(FileSystemConformance, AFolderIsRemovedOnlyWhenItIsEmptyAndWithAllInItByRemoveAll) {
  ASSERT_TRUE(os::make_folders(*files_, at("a/b/c")).ok());
  ASSERT_TRUE(os::make_folders(*files_, at("a/b/c")).ok()) << "it is there already";
  ASSERT_TRUE(write_text(*files_, at("a/b/file"), "x").ok());
  EXPECT_FALSE(files_->remove(at("a/b")).ok());
  EXPECT_EQ(files_->list(at("a/b")).value_or_throw(), (Names{"c", "file"}));
  EXPECT_TRUE(files_->remove(at("a/b/c")).ok());
  EXPECT_TRUE(os::remove_all(*files_, at("a")).ok());
  EXPECT_EQ(files_->list(folder_).value_or_throw(), Names{});
  EXPECT_TRUE(os::remove_all(*files_, at("a")).ok()) << "there is nothing to remove";
  ASSERT_TRUE(write_text(*files_, at("file"), "x").ok());
  EXPECT_EQ(os::make_folders(*files_, at("file/a")).error().code(), ErrorCode::kUnavailable);
}

TEST_P(FileSystemConformance, ASizedFileHoldsWhatIsWrittenToItsBytes) {
  ASSERT_TRUE(write_text(*files_, at("a"), "a former, longer content").ok());
  {
    const auto file = files_->create_sized(at("a"), 4).value_or_throw();
    ASSERT_EQ(file->bytes().size(), 4U);
    EXPECT_EQ(file->bytes()[3], std::byte{0});
    file->bytes()[1] = std::byte{'x'};
  }
  ASSERT_TRUE(files_->sync(at("a")).ok());
  EXPECT_EQ(content_of(*files_, at("a")), std::string("\0x\0\0", 4));
  EXPECT_FALSE(files_->create_sized(at("none/a"), 4).ok());
}

TEST_P(FileSystemConformance, NamesBesideAFileAreNew) {
  const std::string one = files_->create_beside(at("file")).value_or_throw();
  const std::string two = files_->create_beside(at("file")).value_or_throw();
  EXPECT_NE(one, two);
  EXPECT_EQ(files_->list(folder_).value_or_throw().size(), 2U);
  EXPECT_EQ(content_of(*files_, one), "");
  const std::string folder = files_->make_folder_beside(at("file")).value_or_throw();
  EXPECT_NE(files_->make_folder_beside(at("file")).value_or_throw(), folder);
  EXPECT_EQ(files_->list(folder).value_or_throw(), Names{});
  EXPECT_EQ(files_->list(folder_).value_or_throw().size(), 4U);
}

TEST_P(FileSystemConformance, ASharedFileHasOneWriterAndKnowsWhoIsPresent) {
  const auto one = files_->open_shared(at("shared")).value_or_throw();
  auto two = files_->open_shared(at("shared")).value_or_throw();
  EXPECT_TRUE(one->try_lock().value_or_throw());
  EXPECT_FALSE(two->try_lock().value_or_throw());
  ASSERT_TRUE(one->enter().ok());
  EXPECT_TRUE(one->is_alone().value_or_throw());
  ASSERT_TRUE(two->enter().ok());
  EXPECT_FALSE(one->is_alone().value_or_throw());
  two.reset();
  EXPECT_TRUE(one->is_alone().value_or_throw());
  ASSERT_TRUE(one->append_at(0, bytes_of("hello")).ok());
  std::array<std::byte, 9> buffer{};
  EXPECT_EQ(one->read_at(1, buffer).value_or_throw(), 4U);
  ASSERT_TRUE(one->truncate(2).ok());
  EXPECT_EQ(one->size().value_or_throw(), 2U);
  EXPECT_TRUE(one->is_named());
  ASSERT_TRUE(one->remove().ok());
  EXPECT_FALSE(one->is_named());
  EXPECT_TRUE(one->remove().ok()) << "it is removed already";
  one->unlock();
}

// Returns a disk with the durable file /run/latest, whose content is "old".
std::unique_ptr<SimulatedDisk> disk_with_old_file() {
  auto disk = std::make_unique<SimulatedDisk>();
  disk->make_folder("/run").value_or_throw();
  disk->sync("/").value_or_throw();
  os::replace_file(*disk, "/run/latest", bytes_of("old")).value_or_throw();
  return disk;
}

TEST(DurableFiles, AReplacedFileIsOldOrNewAfterAnyFailureAndLossOfPower) {
  int number = 1;
  for (;; ++number) {
    SCOPED_TRACE(number);
    const auto disk = disk_with_old_file();
    disk->fail_operation(static_cast<uint64_t>(number));
    const Status status = os::replace_file(*disk, "/run/latest", bytes_of("new"));
    const bool is_over = !disk->has_failed();
    disk->fail_operation(0);
    EXPECT_EQ(status.ok(), is_over);
    EXPECT_EQ(disk->list("/run").value_or_throw(), Names{"latest"}) << "a temporary file is left";
    for (const bool has_lost_power : {false, true}) {
      if (has_lost_power) disk->lose_power(Unsynced::kOnlyWhatDestroys);
      const std::string content = content_of(*disk, "/run/latest");
      EXPECT_TRUE(content == "new" || (!status.ok() && content == "old")) << content;
    }
    if (is_over) break;
  }
  EXPECT_GT(number, 5);  // at least two creates, a write, a sync, a rename and a sync
}

TEST(DurableFiles, AFolderAppearsWithAllItsFilesOrNotAtAll) {
  int number = 1;
  for (;; ++number) {
    SCOPED_TRACE(number);
    SimulatedDisk disk;
    disk.make_folder("/run").value_or_throw();
    disk.make_folder("/run/tmp").value_or_throw();
    disk.sync("/").value_or_throw();
    disk.fail_operation(static_cast<uint64_t>(number));
    Status status = write_text(disk, "/run/tmp/a", "first");
    if (status.ok()) status = write_text(disk, "/run/tmp/b", "second");
    if (status.ok()) status = os::rename_path(disk, "/run/tmp", "/run/step");
    const bool is_over = !disk.has_failed();
    disk.fail_operation(0);
    EXPECT_EQ(status.ok(), is_over);
    disk.lose_power();
    const bool is_there = disk.list("/run/step").ok();
    EXPECT_TRUE(is_there || !status.ok());
    if (is_there) {
      EXPECT_EQ(content_of(disk, "/run/step/a"), "first");
      EXPECT_EQ(content_of(disk, "/run/step/b"), "second");
    }
    if (is_over) break;
  }
  EXPECT_GT(number, 8);
}

// A loss of power may keep some unsynced changes; here it keeps those that destroy data. So a file
// that was overwritten in place or removed may be gone.
TEST(DurableFiles, WhatOnlyDestroysMayOutliveALossOfPower) {
  for (const Unsynced kept : {Unsynced::kNone, Unsynced::kOnlyWhatDestroys}) {
    const bool is_kept = kept == Unsynced::kOnlyWhatDestroys;
    const auto disk = disk_with_old_file();
    for (const char* path : {"/run/a", "/run/b", "/run/c"}) {
      ASSERT_TRUE(os::replace_file(*disk, path, bytes_of("former")).ok());
    }
    ASSERT_TRUE(disk->create("/run/a").value_or_throw()->write(bytes_of("form 2")).ok());
    ASSERT_TRUE(disk->exchange("/run/b", "/run/c").ok());
    ASSERT_TRUE(disk->remove("/run/b").ok());  // the disk still has this file as /run/c
    ASSERT_TRUE(write_text(*disk, "/run/d", "added").ok());
    disk->lose_power(kept);
    EXPECT_EQ(disk->list("/run").value_or_throw(),
              is_kept ? (Names{"a", "b", "latest"}) : (Names{"a", "b", "c", "latest"}));
    EXPECT_EQ(content_of(*disk, "/run/a"), is_kept ? "form" : "former");
    EXPECT_EQ(content_of(*disk, "/run/b"), "former");
    EXPECT_EQ(content_of(*disk, "/run/latest"), "old");
  }
}

TEST(DurableFiles, FoldersThatWereMadeOutliveALossOfPower) {
  SimulatedDisk disk;
  ASSERT_TRUE(os::make_folders(disk, "/runs/gpt").ok());
  disk.lose_power();
  EXPECT_EQ(disk.kind_of("/runs/gpt").value_or_throw(), os::FileKind::kFolder);
}

TEST(DurableFiles, NothingIsDoneWhileThePowerIsCut) {
  const auto disk = disk_with_old_file();
  disk->cut_power_at(2);
  EXPECT_TRUE(disk->read("/run/latest", 9).ok());
  EXPECT_FALSE(disk->has_failed());
  EXPECT_FALSE(disk->read("/run/latest", 9).ok());
  EXPECT_TRUE(disk->has_failed());
  EXPECT_FALSE(disk->remove("/run/latest").ok());
  EXPECT_FALSE(os::replace_file(*disk, "/run/latest", bytes_of("new")).ok());
  disk->lose_power();
  EXPECT_EQ(content_of(*disk, "/run/latest"), "old");
  EXPECT_TRUE(os::replace_file(*disk, "/run/latest", bytes_of("new")).ok());
}

TEST(DurableFiles, ASizedFileThatWasNotSyncedIsLostAndNeedsItsSpaceAtOnce) {
  SimulatedDisk disk(10);
  ASSERT_TRUE(write_text(disk, "/a", "old").ok());
  ASSERT_TRUE(disk.sync("/").ok());
  ASSERT_TRUE(disk.create_sized("/b", 7).ok());
  EXPECT_EQ(disk.create_sized("/c", 1).error().code(), ErrorCode::kUnavailable);
  disk.lose_power();
  EXPECT_EQ(disk.list("/").value_or_throw(), Names{"a"});
  EXPECT_TRUE(disk.create_sized("/c", 7).ok());
}

TEST(DurableFiles, AFullDiskKeepsTheOldFileAndNothingElse) {
  SimulatedDisk disk(10);
  ASSERT_TRUE(os::replace_file(disk, "/latest", bytes_of("old")).ok());
  const Status status = os::replace_file(disk, "/latest", bytes_of("longer than the disk"));
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code(), ErrorCode::kUnavailable);
  EXPECT_EQ(content_of(disk, "/latest"), "old");
  EXPECT_EQ(disk.list("/").value_or_throw(), Names{"latest"});
  EXPECT_TRUE(os::replace_file(disk, "/latest", bytes_of("newer")).ok()) << "space was not freed";
}

}  // namespace
}  // namespace cadre::sim
