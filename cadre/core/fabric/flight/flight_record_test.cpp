#include "cadre/core/fabric/flight/flight_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "cadre/core/base/format.h"
#include "cadre/core/base/random.h"
#include "cadre/core/collective/op.h"
#include "cadre/core/fabric/flight/flight_recorder.h"
#include "cadre/testing/core/temporary_folder.h"

namespace cadre {
namespace {

const FlightIdentity kIdentity{"world", "node0", 1,           4,      4711,
                               3,       0x1234,  "world/7.0", 0x5566, 0x7788};

Fingerprint fingerprint_of(OpKind kind) {
  return OpDescriptor{kind, DType::kFloat32, ReduceOp::kSum, 0, 8}.fingerprint();
}

class TempFile {
 public:
  std::string path() const { return folder_.file("record"); }
  std::vector<std::byte> bytes() const {
    std::ifstream file(path(), std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const auto* data = reinterpret_cast<const std::byte*>(text.data());
    return {data, data + text.size()};
  }

 private:
  testing::TemporaryFolder folder_;
};

TEST(FlightRecord, AFileTellsWhatRanWhatEndedAndWhatFailed) {
  const TempFile file;
  auto recorder = FlightRecorder::create(file.path(), kIdentity).value_or_throw();
  const uint64_t first = recorder->begin(1, fingerprint_of(OpKind::kAllReduce), -1, {100});
  recorder->end(first, {.now = {150}});
  const uint64_t second = recorder->begin(2, fingerprint_of(OpKind::kBarrier), -1, {200});
  recorder->end(second, {.well = false, .waiting_for = 3, .phase = "reduce", .now = {260}});
  recorder->begin(1, fingerprint_of(OpKind::kRecv), 2, {300});
  // The recorder still exists, so the file has the content that it would have after kill -9.
  const FlightRecord record = parse_flight_record(file.bytes()).value_or_throw();
  EXPECT_EQ(record.identity, kIdentity);
  const std::vector<FlightEntry> expected = {
      {0, 1, fingerprint_of(OpKind::kAllReduce), 100, 150, wire::ActivityState::kDone, -1, ""},
      {1, 2, fingerprint_of(OpKind::kBarrier), 200, 260, wire::ActivityState::kFailed, 3, "reduce"},
      {2, 1, fingerprint_of(OpKind::kRecv), 300, 0, wire::ActivityState::kRunning, 2, ""}};
  EXPECT_EQ(record.entries, expected);
  EXPECT_EQ(recorder->read().entries, expected);
}

// The JSON of a record has the text of each operation, such as "all_gather(float32 x 8)", and not
// its packed fingerprint.
TEST(FlightRecord, JsonHasTheCallsInWords) {
  auto recorder = FlightRecorder::create("", kIdentity).value_or_throw();
  recorder->end(recorder->begin(5, fingerprint_of(OpKind::kAllGather), -1, {10}), {.now = {20}});
  const auto json = nlohmann::json::parse(to_json(recorder->read()));
  EXPECT_EQ(json["group"], "world");
  EXPECT_EQ(json["rank"], 1);
  EXPECT_EQ(json["operations"][0]["call"], "all_gather(float32 x 8)");
  EXPECT_EQ(json["operations"][0]["state"], "done");
  EXPECT_EQ(json["operations"][0]["end_ns"], 20);
}

// Compares the header with bytes that follow the layout in docs/formats/flight-record.md.
TEST(FlightRecord, GoldenHeader) {
  const TempFile file;
  const auto recorder = FlightRecorder::create(file.path(), kIdentity).value_or_throw();
  const std::vector<std::byte> bytes = file.bytes();
  ASSERT_EQ(bytes.size(), 256u + 2000u * 72u);
  const auto text = [&](size_t at, size_t size) {
    return std::string(reinterpret_cast<const char*>(bytes.data()) + at, size);
  };
  EXPECT_EQ(text(0, 8), "CDRFLT03");
  EXPECT_EQ(text(8, 8), std::string("\xd0\x07\0\0\x48\0\0\0", 8));
  EXPECT_EQ(text(16, 12), std::string("\x01\0\0\0\x04\0\0\0\x67\x12\0\0", 12));
  EXPECT_EQ(text(32, 8), std::string("\x03\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(text(40, 6), std::string("node0\0", 6));
  EXPECT_EQ(text(104, 6), std::string("world\0", 6));
  EXPECT_EQ(text(168, 8), std::string("\x34\x12\0\0\0\0\0\0", 8));
  EXPECT_EQ(text(176, 64), "world/7.0" + std::string(55, '\0'));
  EXPECT_EQ(text(240, 8), std::string("\x66\x55\0\0\0\0\0\0", 8));
  EXPECT_EQ(text(248, 8), std::string("\x88\x77\0\0\0\0\0\0", 8));
}

TEST(FlightRecord, GoldenEntry) {
  const TempFile file;
  auto recorder = FlightRecorder::create(file.path(), kIdentity).value_or_throw();
  const Fingerprint fingerprint{.call = 0x0102, .shape = 0x0304};
  recorder->end(recorder->begin(5, fingerprint, 2, {0x100}),
                {.well = false, .waiting_for = 3, .phase = "reduce", .now = {0x200}});
  const std::vector<std::byte> bytes = file.bytes();
  const std::string entry(reinterpret_cast<const char*>(bytes.data()) + 256, 72);
  EXPECT_EQ(entry, std::string("\x01\0\0\0\0\0\0\0"    // the stamp: the index of the operation + 1
                               "\x05\0\0\0\0\0\0\0"    // the number of the operation in its group
                               "\x02\x01\0\0\0\0\0\0"  // the first half of the fingerprint
                               "\x04\x03\0\0\0\0\0\0"  // the second half of the fingerprint
                               "\0\x01\0\0\0\0\0\0"    // the time of the begin, in ns
                               "\0\x02\0\0\0\0\0\0"    // the time of the end, in ns
                               "\x03\0\0\0"            // the state: failed
                               "\x03\0\0\0"            // the operation waited for rank 3
                               "reduce\0\0\0\0\0\0\0\0\0\0",
                               72));
}

TEST(FlightRecord, DamagedFilesAreRefusedOrReadButNeverTrusted) {
  const TempFile file;
  const auto recorder = FlightRecorder::create(file.path(), kIdentity).value_or_throw();
  for (uint64_t i = 0; i < 50; ++i) recorder->begin(i, {.call = i}, -1, {1});
  const std::vector<std::byte> good = file.bytes();
  EXPECT_FALSE(parse_flight_record(ConstBytes(good).first(255)).ok());
  EXPECT_FALSE(parse_flight_record(ConstBytes(good).first(good.size() - 1)).ok());
  Random random(20261121);
  for (int i = 0; i < 300; ++i) {
    std::vector<std::byte> bad = good;
    for (int flips = 0; flips < 20; ++flips) {
      bad[random.below(4000)] = static_cast<std::byte>(random.next());
    }
    const auto record = parse_flight_record(bad);
    if (record.ok()) {
      EXPECT_LE(record->entries.size(), kFlightRecordCapacity);
      EXPECT_TRUE(nlohmann::json::accept(to_json(*record)));
    }
  }
}

// A reader makes a list of all ranks. Its length must not come from a damaged header.
TEST(FlightRecord, ARankOutsideOfItsWorldIsRefused) {
  const TempFile file;
  const auto recorder = FlightRecorder::create(file.path(), kIdentity).value_or_throw();
  const auto parsed = [&](int32_t rank, int32_t world_size) {
    std::vector<std::byte> bytes = file.bytes();
    std::memcpy(bytes.data() + 16, &rank, sizeof rank);
    std::memcpy(bytes.data() + 20, &world_size, sizeof world_size);
    return parse_flight_record(bytes);
  };
  EXPECT_TRUE(parsed(0, 1).ok());
  EXPECT_TRUE(parsed((1 << 20) - 1, 1 << 20).ok());
  EXPECT_FALSE(parsed(0, 2'000'000'000).ok());
  EXPECT_FALSE(parsed(-5, 4).ok());
  EXPECT_FALSE(parsed(4, 4).ok());
  EXPECT_FALSE(parsed(0, 0).ok());
}

TEST(FlightRecord, ControlCharactersOfADamagedRecordAreShownAndNotObeyed) {
  const TempFile file;
  FlightIdentity hostile = kIdentity;
  hostile.host = "node\x1b]0;owned\x07";
  hostile.group = "world\nforged";
  hostile.id = "\x7f\xc2\x9b!";
  auto recorder = FlightRecorder::create(file.path(), hostile).value_or_throw();
  recorder->end(recorder->begin(1, fingerprint_of(OpKind::kBarrier), -1, {1}),
                {.well = false, .phase = "\x1b[2J", .now = {2}});
  const FlightRecord record = parse_flight_record(file.bytes()).value_or_throw();
  EXPECT_EQ(record.identity.host, "node\\x1b]0;owned\\x07");
  EXPECT_EQ(record.identity.group, "world\\x0aforged");
  EXPECT_EQ(record.identity.id, "\\x7f\\xc2\\x9b!");
  ASSERT_EQ(record.entries.size(), 1U);
  EXPECT_EQ(record.entries[0].phase, "\\x1b[2J");
}

TEST(FlightRecord, TimesBeforeTheBootAreNoEntries) {
  const TempFile file;
  auto recorder = FlightRecorder::create(file.path(), kIdentity).value_or_throw();
  recorder->begin(1, fingerprint_of(OpKind::kBarrier), -1, {std::numeric_limits<int64_t>::min()});
  recorder->begin(2, fingerprint_of(OpKind::kBarrier), -1, {1});
  const FlightRecord record = parse_flight_record(file.bytes()).value_or_throw();
  ASSERT_EQ(record.entries.size(), 1U);
  EXPECT_EQ(record.entries[0].number, 2U);
}

}  // namespace
}  // namespace cadre
