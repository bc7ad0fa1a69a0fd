#include "cadre/core/wire/idx_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <span>
#include <string>
#include <vector>

namespace cadre {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

// Compresses with zlib, as `gzip` does.
std::vector<std::byte> gzip(const std::vector<std::byte>& plain) {
  z_stream stream = {};
  EXPECT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 9, Z_DEFAULT_STRATEGY), Z_OK);
  std::vector<std::byte> packed(deflateBound(&stream, plain.size()));
  std::vector<std::byte> input = plain;
  stream.next_in = reinterpret_cast<Bytef*>(input.data());
  stream.avail_in = static_cast<uInt>(input.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

std::string refusal(const std::vector<std::byte>& file) {
  const auto array = parse_idx(file);
  return array.ok() ? "accepted" : array.error().message();
}

IdxArray counting(const std::vector<int64_t>& shape) {
  IdxArray array{.shape = shape, .elements = {}};
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  for (int64_t i = 0; i < count; ++i) array.elements.push_back(static_cast<uint8_t>(i * 7));
  return array;
}

TEST(IdxFile, ReadsAFileWrittenByHand) {
  const auto array = parse_idx(bytes_of({0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 250}));
  ASSERT_TRUE(array.ok()) << array.error().message();
  EXPECT_EQ(array->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(array->elements, (std::vector<uint8_t>{1, 2, 3, 4, 5, 250}));
}

TEST(IdxFile, PlainAndGzipGiveWhatWasWritten) {
  for (const auto& shape : {std::vector<int64_t>{0}, std::vector<int64_t>{5},
                            std::vector<int64_t>{300, 28, 28}, std::vector<int64_t>{4, 0, 9}}) {
    const IdxArray array = counting(shape);
    const std::vector<std::byte> plain = encode_idx(array);
    for (const auto& file : {plain, gzip(plain)}) {
      const auto read = parse_idx(file);
      ASSERT_TRUE(read.ok()) << read.error().message();
      EXPECT_EQ(*read, array);
    }
  }
}

TEST(IdxFile, RefusesEveryPrefixAndEveryLongerFile) {
  const std::vector<std::byte> plain = encode_idx(counting({3, 4}));
  for (const auto& file : {plain, gzip(plain)}) {
    for (size_t size = 0; size < file.size(); ++size) {
      EXPECT_FALSE(parse_idx(std::span(file).first(size)).ok()) << size << " bytes";
    }
  }
  std::vector<std::byte> longer = plain;
  longer.push_back(std::byte{1});
  EXPECT_THAT(refusal(longer), HasSubstr("bytes follow the 12 elements"));
  EXPECT_THAT(refusal(gzip(longer)), HasSubstr("bytes follow the 12 elements"));
}

std::vector<std::byte> joined(std::vector<std::byte> first, std::span<const std::byte> second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

TEST(IdxFile, ReadsGzipMembersOneAfterAnother) {
  const IdxArray array = counting({300, 5});
  const std::vector<std::byte> plain = encode_idx(array);
  for (const size_t cut : {size_t{0}, size_t{3}, plain.size() / 2, plain.size()}) {
    const std::vector<std::byte> head(plain.begin(), plain.begin() + static_cast<int64_t>(cut));
    const std::vector<std::byte> tail(plain.begin() + static_cast<int64_t>(cut), plain.end());
    const auto read = parse_idx(joined(gzip(head), gzip(tail)));
    ASSERT_TRUE(read.ok()) << read.error().message() << ", cut at " << cut;
    EXPECT_EQ(*read, array);
  }
  EXPECT_THAT(refusal(joined(gzip(plain), gzip(plain))),
              HasSubstr("bytes follow the 1500 elements"));
}

TEST(IdxFile, RefusesBytesBehindTheGzipData) {
  const std::vector<std::byte> packed = gzip(encode_idx(counting({3, 4})));
  EXPECT_THAT(refusal(joined(packed, bytes_of({0}))), HasSubstr("1 bytes follow the gzip data"));
  EXPECT_THAT(refusal(joined(packed, bytes_of({'t', 'a', 'i', 'l'}))),
              HasSubstr("4 bytes follow the gzip data; fetch the file again"));
  EXPECT_THAT(refusal(joined(packed, bytes_of({0x1f, 'x'}))), HasSubstr("gzip data is damaged"));
  // The second gzip member is truncated, as by a download that was interrupted.
  const auto second = gzip({});
  for (size_t size = 1; size < second.size(); ++size) {
    EXPECT_THAT(refusal(joined(packed, std::span(second).first(size))),
                HasSubstr("the gzip data is truncated"));
  }
}

TEST(IdxFile, RefusesWithAReason) {
  EXPECT_THAT(refusal({}), HasSubstr("0 bytes read"));
  EXPECT_THAT(refusal(bytes_of({'<', 'h', 't', 'm', 'l'})), HasSubstr("starts with 3c 68 74 6d"));
  EXPECT_THAT(refusal(bytes_of({0, 0, 13, 1, 0, 0, 0, 0})), HasSubstr("elements of type 0x0d"));
  EXPECT_THAT(refusal(bytes_of({0, 0, 8, 0})), HasSubstr("0 axes; expected 1 to 8"));
  EXPECT_THAT(refusal(bytes_of({0, 0, 8, 9})), HasSubstr("9 axes"));
  EXPECT_THAT(refusal(bytes_of({0, 0, 8, 2, 0, 0, 0, 1})), HasSubstr("ends before the sizes"));
  std::vector<std::byte> damaged = gzip(encode_idx(counting({9, 9})));
  damaged[damaged.size() - 6] ^= std::byte{1};  // changes the checksum of the gzip member
  EXPECT_THAT(refusal(damaged), HasSubstr("the gzip data is damaged"));
}

TEST(IdxFile, AllocatesNothingForAClaimThatCannotBe) {
  // The first shape has (2^32 - 1)^3 elements. The second one has 2^31, which is allowed, but only
  // two bytes follow.
  const auto huge = bytes_of({0, 0, 8, 3, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,  //
                              255});
  EXPECT_THAT(refusal(huge), HasSubstr("the product of its axes is more than 2147483648"));
  const auto large = bytes_of({0, 0, 8, 1, 128, 0, 0, 0, 1, 2});
  EXPECT_THAT(refusal(large), HasSubstr("declares 2147483648 elements, but at most 2 can follow"));
  EXPECT_THAT(refusal(gzip(large)), HasSubstr("declares 2147483648 elements, but at most"));
}

}  // namespace
}  // namespace cadre
