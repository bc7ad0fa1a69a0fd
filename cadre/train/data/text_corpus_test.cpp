#include "cadre/train/data/text_corpus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

class TextCorpusTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& content) {
    const std::filesystem::path path = folder_ + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }

  // Returns the whole corpus as text, with "|" for <|endoftext|>.
  static std::string all_of(const TextCorpus& corpus) {
    std::vector<int64_t> tokens(static_cast<size_t>(corpus.num_tokens()));
    corpus.copy_tokens(0, tokens);
    return text_of(tokens);
  }

  static std::string text_of(const std::vector<int64_t>& tokens) {
    std::string text;
    for (const int64_t token : tokens) {
      text += token == kEndOfText ? '|' : static_cast<char>(token);
    }
    return text;
  }

  testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.file("");
};

TEST_F(TextCorpusTest, AFolderIsItsFilesInTheOrderOfTheirPaths) {
  write("b.txt", "B");
  write("a/z.txt", "AZ");
  write("a/empty.txt", "");
  write("c/.hidden.txt", "no");
  write(".git/x.txt", "no");
  write("c/program", std::string("no\0no", 5));
  const TextCorpus corpus = TextCorpus::open(folder_);
  EXPECT_EQ(all_of(corpus), "AZ|B|");
  EXPECT_EQ(corpus.num_files(), 2);
}

TEST_F(TextCorpusTest, SuffixesAndFoldersChoose) {
  write("a.py", "A");
  write("a.txt", "no");
  write("x/site-packages/b.py", "no");
  write("x/c.py", "C");
  const TextCorpus corpus =
      TextCorpus::open(folder_, {.suffixes = {".py"}, .skipped_folders = {"site-packages"}});
  EXPECT_EQ(all_of(corpus), "A|C|");
}

TEST_F(TextCorpusTest, MarksCutStories) {
  const std::string path = write("s.txt", "<|endoftext|>one<|endoftext|><|endoftext|>two\xc3\xa9");
  const TextCorpus corpus = TextCorpus::open(path);
  EXPECT_EQ(all_of(corpus), "one|two\xc3\xa9|");
  EXPECT_EQ(corpus.num_documents(), 2);
}

TEST_F(TextCorpusTest, EveryWindowIsAPartOfTheWhole) {
  write("a", "abc");
  write("b", "d");
  write("c", "efghi");
  const TextCorpus corpus = TextCorpus::open(folder_);
  const std::string all = all_of(corpus);
  ASSERT_EQ(all, "abc|d|efghi|");
  for (size_t begin = 0; begin < all.size(); ++begin) {
    for (size_t count = 0; begin + count <= all.size(); ++count) {
      std::vector<int64_t> tokens(count);
      corpus.copy_tokens(static_cast<int64_t>(begin), tokens);
      EXPECT_EQ(text_of(tokens), all.substr(begin, count));
    }
  }
}

TEST_F(TextCorpusTest, FingerprintSeesAChangedFile) {
  write("a", "abc");
  const uint64_t before = TextCorpus::open(folder_).fingerprint();
  EXPECT_EQ(TextCorpus::open(folder_).fingerprint(), before);
  write("a", "abd");
  EXPECT_NE(TextCorpus::open(folder_).fingerprint(), before);
}

TEST_F(TextCorpusTest, SaysWhereThereIsNoText) {
  const auto message = [&](const std::string& path) {
    try {
      TextCorpus::open(path);
    } catch (const Error& error) {
      return error.message();
    }
    return std::string();
  };
  EXPECT_THAT(message(folder_), ::testing::HasSubstr("has no text"));
  EXPECT_THAT(message(folder_ + "none"), ::testing::HasSubstr("No such file"));
}

TEST_F(TextCorpusTest, ALargeTextOnTheDiskIsThatOfMemory) {
  // The marks cross the boundaries of the parts in which a file is scanned, at several offsets.
  std::string text(1 << 20, 'x');
  for (size_t place = 3; place < 17; ++place) text[text.size() - place] = 'y';
  for (const size_t before_end : {13, 7, 1, 0}) {
    const std::string content =
        text.substr(0, text.size() - before_end) + "<|endoftext|>" + text + "<|endoftext|>z";
    write("a", content);
    write("b", "<|endoftext|>b");
    write("c", std::string("no\0no", 5));
    const TextCorpus held = TextCorpus::open(folder_);
    const TextCorpus on_disk = TextCorpus::open(folder_, {.max_bytes_in_memory = 100});
    EXPECT_EQ(on_disk.num_documents(), 4);
    EXPECT_EQ(on_disk.num_files(), 2);
    EXPECT_EQ(on_disk.fingerprint(), held.fingerprint());
    EXPECT_TRUE(all_of(on_disk) == all_of(held)) << before_end;
    EXPECT_TRUE(on_disk.is_unchanged());
  }
}

TEST_F(TextCorpusTest, ATextInMemoryOutlivesItsFiles) {
  const std::string path = write("a", "abc");
  const TextCorpus corpus = TextCorpus::open(path);
  write("a", "x");
  EXPECT_EQ(all_of(corpus), "abc|");
  EXPECT_TRUE(corpus.is_unchanged());
  EXPECT_NO_THROW(corpus.check_unchanged());
}

TEST_F(TextCorpusTest, AChangedFileOnTheDiskIsNamedAndEndsInNoSignal) {
  const auto refusal = [&](const std::function<void(const std::string& path)>& change) {
    const std::string path = write("a", std::string(20000, 'a'));
    const TextCorpus corpus = TextCorpus::open(path, {.max_bytes_in_memory = 100});
    EXPECT_EQ(all_of(corpus).size(), 20001u);
    EXPECT_TRUE(corpus.is_unchanged());
    change(path);
    (void)all_of(corpus);
    EXPECT_FALSE(corpus.is_unchanged());
    try {
      corpus.check_unchanged();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.message();
    }
    return std::string("accepted");
  };
  const std::string changed = "the text has changed while it was used: " + folder_ + "a ";
  EXPECT_THAT(refusal([](const std::string& path) { std::filesystem::resize_file(path, 0); }),
              ::testing::StartsWith(changed + "has 0 bytes instead of 20000 since it was opened"));
  EXPECT_THAT(refusal([](const std::string& path) {
                // Changes the file in place.
                std::fstream(path, std::ios::in | std::ios::out) << "bb";
                std::filesystem::last_write_time(
                    path, std::filesystem::last_write_time(path) + std::chrono::seconds(1));
              }),
              ::testing::StartsWith(changed + "was written since it was opened"));
}

// The corpus keeps fewer files open than there are here, so reading them all opens each file again.
TEST_F(TextCorpusTest, AReplacedFileIsNoticedWhenItIsOpenedAgain) {
  for (int i = 0; i < 100; ++i) write("f" + std::to_string(100 + i), "text " + std::to_string(i));
  const TextCorpus corpus = TextCorpus::open(folder_, {.max_bytes_in_memory = 100});
  const std::string before = all_of(corpus);
  EXPECT_EQ(all_of(corpus), before);
  std::filesystem::rename(folder_ + "f100", folder_ + ".f100");
  write("f100", "text 0");
  (void)all_of(corpus);
  EXPECT_THROW(corpus.check_unchanged(), Error);
}

TEST_F(TextCorpusTest, SplitsByPosition) {
  write("a", std::string(999, 'x'));
  const TextSplit split = split_by_position(TextCorpus::open(folder_), 0.1);
  EXPECT_EQ(split.train.begin, 0);
  EXPECT_EQ(split.train.end, 900);
  EXPECT_EQ(split.held_out.begin, 900);
  EXPECT_EQ(split.held_out.end, 1000);
}

}  // namespace
}  // namespace cadre
