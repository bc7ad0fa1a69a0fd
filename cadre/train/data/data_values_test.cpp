// Tests every class of cadre/train/data with null, moved-from, negative and very large arguments.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/testing/core/temporary_folder.h"
#include "cadre/train/data/batches/prefetcher.h"
#include "cadre/train/data/bigram.h"
#include "cadre/train/data/data_loader.h"
#include "cadre/train/data/distributed_sampler.h"
#include "cadre/train/data/synthetic_dataset.h"
#include "cadre/train/data/text_corpus.h"

namespace cadre {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr int64_t kMost = std::numeric_limits<int64_t>::min();

// Returns the message of the kInvalidArgument that `call` throws.
std::string refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.message();
    return error.message();
  }
  return "accepted";
}

SyntheticRegression nine() {
  return SyntheticRegression({.num_samples = 9, .num_inputs = 2});
}

int64_t rows_of_epoch(DataLoader& loader, int64_t epoch) {
  int64_t num_rows = 0;
  for (const auto& [data, target] : loader.epoch(epoch)) num_rows += data.size(0);
  return num_rows;
}

TEST(DataValues, ALoaderNamesAnEpochBelowZeroAndANullDataset) {
  DataLoader loader = make_data_loader(nine(), {.batch_size = 2});
  for (const int64_t epoch : {int64_t{-1}, kMost}) {
    EXPECT_THAT(refused([&] { loader.epoch(epoch); }), HasSubstr("expected 0 or more"));
  }
  EXPECT_EQ(rows_of_epoch(loader, 0), 9);
  EXPECT_EQ(refused([] { DataLoader(nullptr, {.batch_size = 1}); }),
            "DataLoader: the dataset is null");
}

TEST(DataValues, ALoaderWithVeryLargeNumbersDeliversEverySampleOnce) {
  for (const int num_threads : {0, 2}) {
    DataLoader loader = make_data_loader(
        nine(),
        {.batch_size = kHuge, .seed = kHuge, .num_threads = num_threads, .prefetch = kHuge});
    EXPECT_EQ(loader.batches_per_epoch(), 1);
    EXPECT_EQ(rows_of_epoch(loader, kHuge), 9);
    EXPECT_EQ(rows_of_epoch(loader, 1), 9);
    loader.seek({.epoch = kHuge, .samples = 4});
    EXPECT_EQ(rows_of_epoch(loader, kHuge), 5);
    EXPECT_THAT(refused([&] { loader.seek({.epoch = 0, .samples = kHuge}); }),
                HasSubstr("expected a sample in [0, 9]"));
  }
}

TEST(DataValues, ALoaderThatWasMovedFromSaysSo) {
  DataLoader first = make_data_loader(nine(), {.batch_size = 2, .num_threads = 1});
  auto epoch = first.epoch(0);
  DataLoader second = std::move(first);
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { first.epoch(0); }, [&] { first.batches_per_epoch(); },
           [&] { first.seek({.epoch = 0, .samples = 1}); }, [&] { epoch.begin(); }}) {
    EXPECT_THAT(refused(use), HasSubstr("this loader was moved from"));
  }
  EXPECT_EQ(rows_of_epoch(second, 0), 9);
  first = std::move(second);
  EXPECT_EQ(rows_of_epoch(first, 0), 9);
}

TEST(DataValues, ASamplerNamesWhatIsOutOfRange) {
  for (const int64_t num_samples : {int64_t{-1}, kMost, kHuge}) {
    EXPECT_THAT(refused([&] { DistributedSampler({.num_samples = num_samples}); }),
                HasSubstr("a number of samples in [0, 281474976710656]"));
    EXPECT_THAT(refused([&] { seeded_permutation(num_samples, 0); }),
                HasSubstr("seeded_permutation: "));
  }
  const DistributedSampler sampler({.num_samples = 5, .seed = kHuge});
  EXPECT_EQ(sampler.indices(kHuge).size(), 5u);
  EXPECT_EQ(sampler.indices(kMost).size(), 5u);
}

TEST(DataValues, APrefetcherNamesWhatIsOutOfRange) {
  const auto system = os::make_native_system();
  const auto make = [](int64_t i) { return i; };
  const auto refuses = [&](int64_t num_items, std::function<int64_t(int64_t)> function,
                           const PrefetchOptions& options) {
    return refused([&] { Prefetcher<int64_t>(*system, num_items, std::move(function), options); });
  };
  for (const std::string& message :
       {refuses(-1, make, {}), refuses(1, nullptr, {}), refuses(1, make, {.num_threads = 0}),
        refuses(1, make, {.depth = 0})}) {
    EXPECT_THAT(message, HasSubstr("Prefetcher: "));
  }
}

TEST(DataValues, GeneratedDatasetsNameWhatIsOutOfRange) {
  EXPECT_THAT(refused([] { SyntheticRegression({.num_samples = -1}); }), HasSubstr("-1 samples"));
  EXPECT_THAT(refused([] { SyntheticRegression({.num_inputs = 0}); }), HasSubstr("0 inputs"));
  EXPECT_THAT(refused([] { SyntheticImages({.num_classes = 0}); }), HasSubstr("0 classes"));
  EXPECT_THAT(refused([] { SyntheticImages({.size = -3}); }), HasSubstr("-3 pixels"));
  const SyntheticImages images({.num_samples = 4, .num_classes = 2, .size = 3});
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{-1, 2}, {3, 2}, {0, 5}}) {
    EXPECT_THAT(refused([&] { images.slice(begin, end); }),
                HasSubstr("of 4 samples; expected 0 <= begin <= end <= 4"));
  }
}

class TextValues : public ::testing::Test {
 protected:
  TextValues() { std::ofstream(folder_.file("text")) << "abcdefgh"; }

  std::shared_ptr<const TextCorpus> open() const {
    return std::make_shared<const TextCorpus>(TextCorpus::open(folder_.file("text")));
  }

  const testing::TemporaryFolder folder_;
};

TEST_F(TextValues, ACorpusThatWasMovedFromSaysSo) {
  TextCorpus corpus = TextCorpus::open(folder_.file("text"));
  const TextCorpus taken = std::move(corpus);
  std::vector<int64_t> tokens(1);
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { corpus.num_tokens(); }, [&] { corpus.num_documents(); },
           [&] { corpus.num_files(); }, [&] { corpus.fingerprint(); },
           [&] { corpus.copy_tokens(0, tokens); }, [&] { split_by_position(corpus, 0.1); },
           [&] {
             bigram_conditional_entropy(corpus, {0, 2});
           }}) {
    EXPECT_THAT(refused(use), HasSubstr("this corpus was moved from"));
  }
  EXPECT_EQ(taken.num_tokens(), 9);
}

TEST_F(TextValues, TokensOutOfRangeAreNamed) {
  const auto corpus = open();
  std::vector<int64_t> tokens(4);
  for (const int64_t begin : {int64_t{-1}, int64_t{6}, int64_t{10}, kHuge, kMost}) {
    EXPECT_THAT(refused([&] { corpus->copy_tokens(begin, tokens); }), HasSubstr("the text has 9"));
  }
  corpus->copy_tokens(9, {});
  for (const double fraction : {-0.1, 1.1, std::nan("")}) {
    EXPECT_THAT(refused([&] { split_by_position(*corpus, fraction); }),
                HasSubstr("expected a number from 0 to 1"));
  }
}

// If opened, a pipe would block until some process writes to it. open() must throw instead.
TEST_F(TextValues, APipeIsNoText) {
  ASSERT_EQ(::mkfifo(folder_.file("pipe").c_str(), 0600), 0);
  EXPECT_THAT(refused([&] { TextCorpus::open(folder_.file("pipe")); }),
              HasSubstr("is a pipe, a socket or a device; expected a file"));
}

TEST_F(TextValues, AChangedByteAnywhereChangesTheFingerprint) {
  std::string text(1000, 'x');
  std::ofstream(folder_.file("long")) << text;
  const uint64_t before = TextCorpus::open(folder_.file("long")).fingerprint();
  for (const size_t at : {size_t{0}, size_t{100}, size_t{500}, size_t{900}, size_t{999}}) {
    text[at] = 'y';
    std::ofstream(folder_.file("long")) << text;
    text[at] = 'x';
    EXPECT_NE(TextCorpus::open(folder_.file("long")).fingerprint(), before) << at;
  }
}

TEST(DataValues, ADigestSeesTheSeed) {
  const auto digest = [](const Dataset& dataset) { return dataset.digest().value(); };
  EXPECT_EQ(digest(nine()), digest(nine()));
  EXPECT_NE(digest(SyntheticRegression({.num_samples = 9, .num_inputs = 2, .seed = 1})),
            digest(nine()));
}

}  // namespace
}  // namespace cadre
