#include "cadre/train/data/tokens/token_dataset.h"

#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/random.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/testing/torch/process_group_ranks.h"
#include "cadre/train/data/data_loader.h"
#include "cadre/train/data/samplers/samplers.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

using Tokens = std::vector<int64_t>;

Tokens counted_tokens(int64_t first, int64_t count) {
  Tokens tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Tokens row(const at::Tensor& tensor, int64_t index) {
  const at::Tensor values = tensor.select(0, index).contiguous();
  const auto* first = values.const_data_ptr<int64_t>();
  return {first, first + values.numel()};
}

Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::kInternal, "accepted"};
}

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::ssize(bytes));
}

std::string bytes_of_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

class TokenDatasetTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.file(name); }

  const testing::TemporaryFolder folder_;
};

TEST_F(TokenDatasetTest, WindowsPredictEachTokenOnce) {
  write_token_file(path("b.bin"), counted_tokens(1000, 21));
  write_token_file(path("a.bin"), counted_tokens(0, 10));
  write_token_file(path("c.bin"),
                   counted_tokens(70000, 5));  // tokens of 32 bits, too few for a sample
  write_token_file(path("d.bin"), counted_tokens(80000, 13));
  write_bytes(path("notes.txt"), "no tokens");
  const TokenDataset dataset(folder_.path().string(), {.length = 5});
  EXPECT_EQ(dataset.num_files(), 4);
  EXPECT_EQ(dataset.num_tokens(), 49);
  ASSERT_EQ(dataset.size(), 1 + 4 + 0 + 2);
  const Tokens expected = {0, 1000, 1005, 1010, 1015, 80000, 80005};
  const std::vector<int64_t> indices = {6, 0, 3, 1, 2, 5, 4};
  const Batch batch = dataset.get(indices);
  EXPECT_EQ(batch.data.sizes(), (std::vector<int64_t>{7, 5}));
  for (int64_t i = 0; i < 7; ++i) {
    const int64_t first = expected[static_cast<size_t>(indices[static_cast<size_t>(i)])];
    EXPECT_EQ(row(batch.data, i), counted_tokens(first, 5));
    EXPECT_EQ(row(batch.target, i), counted_tokens(first + 1, 5));
  }
  EXPECT_EQ(dataset.get({}).data.sizes(), (std::vector<int64_t>{0, 5}));
  const TokenDataset one(path("b.bin"), {.length = 20});
  EXPECT_EQ(one.size(), 1);
}

TEST_F(TokenDatasetTest, ReadsPlainArrays) {
  write_bytes(path("plain"), std::string("\x01\x00\x02\x01\xff\xff\x03\x00", 8));
  const TokenDataset narrow({path("plain")}, {.length = 3, .format = TokenFormat::kPlainUint16});
  EXPECT_EQ(row(narrow.get(std::vector<int64_t>{0}).data, 0), (Tokens{1, 258, 65535}));
  const TokenDataset wide({path("plain")}, {.length = 1, .format = TokenFormat::kPlainUint32});
  EXPECT_EQ(row(wide.get(std::vector<int64_t>{0}).target, 0), (Tokens{0x3ffff}));
  write_bytes(path("odd"), "abc");
  const Error error = error_of(
      [&] { TokenDataset({path("odd")}, {.length = 1, .format = TokenFormat::kPlainUint16}); });
  EXPECT_EQ(error.code(), ErrorCode::kCorruption);
  EXPECT_THAT(error.message(), ::testing::HasSubstr(path("odd") + " at byte 2"));
}

TEST_F(TokenDatasetTest, DamageIsNamedWithFileAndOffset) {
  using ::testing::HasSubstr;
  write_token_file(path("a.bin"), counted_tokens(0, 100));
  const std::string valid = bytes_of_file(path("a.bin"));
  const auto refusal = [&](const std::string& bytes) {
    write_bytes(path("bad.bin"), bytes);
    const Error error = error_of([&] { TokenDataset(path("bad.bin"), {.length = 9}); });
    EXPECT_EQ(error.code(), ErrorCode::kCorruption);
    EXPECT_THAT(error.message(), HasSubstr(path("bad.bin")));
    return error.message();
  };
  for (const size_t size : {size_t{0}, size_t{1}, size_t{1023}, valid.size() - 1}) {
    EXPECT_THAT(refusal(valid.substr(0, size)), HasSubstr("at byte "));
  }
  EXPECT_THAT(refusal("x" + valid.substr(1)), HasSubstr("at byte 0: the magic is"));
  EXPECT_THAT(refusal(valid + "x"), HasSubstr("and the file has 1225"));
  const TokenDataset small(path("a.bin"), {.length = 9, .vocabulary_size = 50});
  EXPECT_NO_THROW(small.get(std::vector<int64_t>{0}));
  const TokenDataset smaller(path("a.bin"), {.length = 9, .vocabulary_size = 45});
  EXPECT_THROW(smaller.get(std::vector<int64_t>{4}), Error);  // only the last of its targets is 45
  const Error error = error_of([&] { small.get(std::vector<int64_t>{5}); });
  EXPECT_EQ(error.code(), ErrorCode::kCorruption);
  EXPECT_THAT(error.message(), HasSubstr(path("a.bin") + " at byte 1124: the token is 50"));
}

TEST_F(TokenDatasetTest, AFileThatChangesIsNamed) {
  const auto refusal = [&](const std::function<void(const std::string& file)>& change) {
    write_token_file(path("a.bin"), counted_tokens(0, 100));
    const TokenDataset dataset(path("a.bin"), {.length = 9});
    (void)dataset.get(std::vector<int64_t>{0});
    change(path("a.bin"));
    const Error error = error_of([&] { (void)dataset.get(std::vector<int64_t>{10}); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.message();
  };
  EXPECT_THAT(refusal([](const std::string& file) { fs::resize_file(file, 1100); }),
              ::testing::HasSubstr(path("a.bin") + " has 1100 bytes instead of 1224"));
  EXPECT_THAT(refusal([](const std::string& file) {
                std::ofstream(file, std::ios::binary | std::ios::in | std::ios::out) << "other";
                fs::last_write_time(file,
                                    fs::file_time_type::clock::now() + std::chrono::seconds(5));
              }),
              ::testing::HasSubstr("a.bin"));
}

TEST_F(TokenDatasetTest, ItsDigestTellsOtherTokensApart) {
  write_token_file(path("a.bin"), counted_tokens(0, 100));
  write_token_file(path("b.bin"), counted_tokens(1, 100));
  const auto digest = [&](const std::string& name, int64_t length) {
    return TokenDataset(path(name), {.length = length}).digest();
  };
  EXPECT_EQ(digest("a.bin", 9), digest("a.bin", 9));
  EXPECT_NE(digest("a.bin", 9), digest("b.bin", 9));
  EXPECT_NE(digest("a.bin", 9), digest("a.bin", 8));
  const TokenDataset ab(std::vector<std::string>{path("a.bin"), path("b.bin")}, {.length = 9});
  const TokenDataset ba(std::vector<std::string>{path("b.bin"), path("a.bin")}, {.length = 9});
  EXPECT_NE(ab.digest(), ba.digest());
}

// Ranks with several threads read an epoch in a keyed order; each window comes once.
TEST_F(TokenDatasetTest, ALoaderReadsEachWindowOnce) {
  for (int64_t file = 0; file < 70; ++file) {  // more files than are kept open
    write_token_file(path("part" + std::to_string(file) + ".bin"),
                     counted_tokens(file * 100, 1 + 4 * (file % 6)));
  }
  std::vector<Tokens> firsts(3);
  int64_t size = 0;
  const auto result = testing::run_groups(3, [&](const ProcessGroup& world) {
    auto dataset = std::make_shared<const TokenDataset>(folder_.path().string(),
                                                        TokenDatasetOptions{.length = 4});
    if (world.rank() == 0) size = dataset->size();
    DataLoader loader(dataset, {.batch_size = 7,
                                .ranks = world,
                                .sampler = std::make_shared<KeyedSampler>(dataset->size(), 3),
                                .num_threads = 2});
    for (const Batch& batch : loader.epoch(1)) {
      for (int64_t i = 0; i < batch.data.size(0); ++i) {
        const Tokens tokens = row(batch.data, i);
        EXPECT_EQ(tokens, counted_tokens(tokens[0], 4));
        firsts[static_cast<size_t>(world.rank())].push_back(tokens[0]);
      }
    }
  });
  ASSERT_TRUE(result.ok()) << result.failures();
  Tokens all;
  for (const Tokens& part : firsts) all.insert(all.end(), part.begin(), part.end());
  std::ranges::sort(all);
  Tokens expected;
  for (int64_t file = 0; file < 70; ++file) {
    for (int64_t i = 0; i < file % 6; ++i) expected.push_back(file * 100 + 4 * i);
  }
  EXPECT_EQ(all, expected);
  EXPECT_EQ(std::ssize(expected), size);
}

TEST_F(TokenDatasetTest, RefusesWhatCannotBe) {
  EXPECT_THROW(TokenDataset(std::vector<std::string>{}, {}), Error);
  EXPECT_THROW(TokenDataset(folder_.path().string(), {}), Error);  // an empty folder
  EXPECT_THROW(TokenDataset(path("missing.bin"), {}), Error);
  write_token_file(path("a.bin"), counted_tokens(0, 10));
  for (const int64_t length : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_THROW(TokenDataset(path("a.bin"), {.length = length}), Error);
  }
  EXPECT_THROW(TokenDataset(path("a.bin"), {.length = 1, .vocabulary_size = 0}), Error);
  TokenDataset dataset(path("a.bin"), {.length = 4});
  EXPECT_THROW(dataset.get(std::vector<int64_t>{2}), Error);
  EXPECT_THROW(dataset.get(std::vector<int64_t>{-1}), Error);
  EXPECT_EQ(TokenDataset(path("a.bin"), {.length = 10}).size(), 0);
  const TokenDataset moved = std::move(dataset);
  EXPECT_EQ(moved.size(), 2);
  EXPECT_THROW(dataset.size(), Error);  // NOLINT(bugprone-use-after-move): is refused
  EXPECT_THROW(write_token_file(path("x"), Tokens{-1}), Error);
  EXPECT_THROW(write_token_file(path("x"), Tokens{int64_t{1} << 32}), Error);
}

}  // namespace
}  // namespace cadre
