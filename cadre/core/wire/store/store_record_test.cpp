// Tests the bytes of the records of the file store.
#include "cadre/core/wire/store/store_record.h"

#include <gtest/gtest.h>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/store/store_message.h"

namespace cadre::wire {
namespace {

std::vector<StoreRecord> sample_records() {
  return {{StoreRecordVerb::kJoin, "", ""},
          {StoreRecordVerb::kSet, "k", std::string("\0\xff", 2)},
          {StoreRecordVerb::kAppend, "k", "more"},
          {StoreRecordVerb::kErase, std::string("\0", 1), ""},
          {StoreRecordVerb::kPush, "q", std::string(1000, 'x')},
          {StoreRecordVerb::kPop, "q", ""}};
}

TEST(StoreRecord, EverythingComesBackAsItWasWritten) {
  for (const StoreRecord& record : sample_records()) {
    const auto bytes = encode(record);
    const auto decoded = decode_store_record(bytes).value();
    EXPECT_EQ(decoded.record, record);
    EXPECT_EQ(decoded.num_bytes, bytes.size());
  }
}

TEST(StoreRecord, EveryCutOfARecordIsTorn) {
  for (const StoreRecord& record : sample_records()) {
    const auto bytes = encode(record);
    for (size_t length = 0; length < bytes.size(); ++length) {
      const auto decoded = decode_store_record(ConstBytes(bytes).first(length));
      ASSERT_TRUE(decoded.ok()) << length;
      EXPECT_FALSE(decoded->record);
      EXPECT_GT(decoded->num_bytes, length);
    }
  }
}

TEST(StoreRecord, AChangedByteIsTornAtTheEndAndCorruptionBefore) {
  const auto good = encode(sample_records()[1]);
  for (size_t at = 4; at < good.size(); ++at) {  // offset 4 follows the length field
    auto bytes = good;
    bytes[at] ^= std::byte{1};
    const auto last = decode_store_record(bytes);
    ASSERT_TRUE(last.ok()) << at;
    EXPECT_FALSE(last->record) << at;
    bytes.insert(bytes.end(), good.begin(), good.end());
    const auto followed = decode_store_record(bytes);
    ASSERT_FALSE(followed.ok()) << at;
    EXPECT_EQ(followed.error().code(), ErrorCode::kCorruption);
  }
}

TEST(StoreRecord, ZeroesAreTornAndImpossibleLengthsAreCorruption) {
  EXPECT_FALSE(decode_store_record(std::vector<std::byte>(100))->record);
  std::vector<std::byte> huge(100, std::byte{0xff});
  EXPECT_EQ(decode_store_record(huge).error().code(), ErrorCode::kCorruption);
}

// The expected bytes are those of the example in docs/formats/store-file.md.
TEST(StoreRecord, TheBytesAreThoseOfTheFormatPage) {
  const auto bytes = encode(StoreRecord{StoreRecordVerb::kSet, "n", "42"});
  EXPECT_EQ(as_text(ConstBytes(bytes).first(4)), std::string("\x0c\0\0\0", 4));
  EXPECT_EQ(as_text(ConstBytes(bytes).subspan(4, 8)),  // the checksum
            std::string("\xf4\x49\x48\x2a\x93\xff\xcc\x23", 8));
  EXPECT_EQ(as_text(ConstBytes(bytes).subspan(12)),
            std::string("\x01"         // the verb set
                        "\x01\0\0\0n"  // the key
                        "\x02\0\0\0"
                        "42",
                        12));
}

}  // namespace
}  // namespace cadre::wire
